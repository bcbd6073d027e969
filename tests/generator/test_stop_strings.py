"""Stop strings that vLLM cannot find, because it looks for them in text without special tokens.

Covers: generator/conversion.py
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.outputs import CompletionOutput

from generator.conversion import to_completion, to_vllm
from rl.types import SamplingParams
from tests.generator.served_models import served_llama

pytestmark = pytest.mark.vllm


def test_a_special_token_becomes_a_stop_token(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(served_llama(tmp_path / "model", tied=True))
    special, number = next((str(t), i) for i, t in tokenizer.added_tokens_decoder.items() if t.special)
    assert tokenizer.decode([number], skip_special_tokens=True) == ""
    sampling = SamplingParams(max_tokens=20, stop=("never", special), stop_token_ids=(3,))
    converted = to_vllm(sampling, 1, tokenizer)
    assert (converted.stop, converted.stop_token_ids) == (["never"], [3, number])
    alone = to_vllm(replace(sampling, stop=(special,)), 1, tokenizer)
    assert (alone.stop, alone.stop_token_ids, alone.detokenize) == ([], [3, number], False)
    with pytest.raises(ValueError, match=r"which is never found: .* is a special token, which the text lacks"):
        to_vllm(replace(sampling, stop=(special + "\n",)), 1, tokenizer)
    with pytest.raises(ValueError, match=r"stop is \('never', .*; the model has no tokenizer to find it"):
        to_vllm(sampling, 1, None)


@pytest.mark.stranger("C4")
@pytest.mark.parametrize(
    ("stop", "ends", "text"),
    [
        (None, "<end>", "<tool_call>w5</tool_call>w6"),
        ("w6", "w6", "<tool_call>w5</tool_call>"),
        ("w9", "<end>", "cut by vLLM"),
        (7, "</tool_call>", "<tool_call>w5</tool_call>w6"),
    ],
)
def test_calls_between_special_tokens_are_found(tmp_path: Path, stop: str | int | None, ends: str, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(served_llama(tmp_path / "model", tied=True))
    special = {"eos_token": "<end>", "additional_special_tokens": ["<tool_call>", "</tool_call>"]}
    tokenizer.add_special_tokens(special)
    tokens = tokenizer.convert_tokens_to_ids(["<tool_call>", "w5", "</tool_call>", *(["w6"] * (ends != "w6")), ends])
    logprobs: Any = SimpleNamespace(logprobs=[-1.0] * len(tokens))
    sample = CompletionOutput(0, "cut by vLLM", tokens, -1.0, logprobs, finish_reason="stop", stop_reason=stop)
    sample.weight_versions = [SimpleNamespace(version=0, start=0, end=len(tokens))]  # pyright: ignore[reportAttributeAccessIssue]
    completion = to_completion(sample, tokenizer, None)
    assert completion.text.replace(" ", "") == text.replace(" ", "")
