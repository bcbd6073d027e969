"""Stop strings that vLLM cannot find, because it looks for them in text without special tokens."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from generator.conversion import to_vllm
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
