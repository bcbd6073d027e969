"""Stop strings that vLLM cannot find, because it looks for them in text without special tokens."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.outputs import CompletionOutput
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from generator.conversion import to_completion, to_vllm
from rl.types import Completion, SamplingParams
from tests.generator.served_models import served_llama
from tests.rl.rollouts.chat_models import chat_model

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


def detokenized(tokenizer: Any, prompt: str, answer: str, stop: str) -> Completion:
    """The completion that vLLM's detokenizer makes of an answer's tokens, one by one."""
    params = to_vllm(SamplingParams(max_tokens=100, stop=(stop,)), 1, tokenizer)
    request: Any = SimpleNamespace(
        sampling_params=params, prompt_token_ids=tokenizer.encode(prompt, add_special_tokens=False), request_id="0"
    )
    detokenizer = FastIncrementalDetokenizer(tokenizer, request)
    tokens, found = list[int](), None
    for token in tokenizer.encode(answer, add_special_tokens=False):
        tokens.append(token)
        if found := detokenizer.update([token], stop_terminated=False):
            break
    logprobs: Any = SimpleNamespace(logprobs=[-1.0] * len(tokens))
    reason = "length" if found is None else "stop"
    sample = CompletionOutput(
        0, detokenizer.output_text, tokens, -1.0, logprobs, finish_reason=reason, stop_reason=found
    )
    sample.weight_versions = [SimpleNamespace(version=0, start=0, end=len(tokens))]  # pyright: ignore[reportAttributeAccessIssue]
    return to_completion(sample, tokenizer, None)


@pytest.mark.parametrize("spaced", [True, False])
@pytest.mark.parametrize(
    ("answer", "stop"),
    [("42\nmore", "\n"), (" 42\nmore", "\n"), ("4 and 2.", " and"), ("a, b, c", ", c"), ("one <think> two", " two")],
)
def test_a_text_is_the_same_whatever_ended_it(tmp_path: Path, spaced: bool, answer: str, stop: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_model(tmp_path, "llama2", spaced=spaced))
    stopped, cut = detokenized(tokenizer, "What?", answer, stop), answer.partition(stop)[0]
    assert (stopped.finish_reason, stopped.text) == ("stop", detokenized(tokenizer, "What?", cut, stop).text)
    assert tokenizer.decode(stopped.tokens).endswith(stop)
    assert stopped.text == cut.removeprefix(" " * spaced)


@pytest.mark.parametrize(
    ("answer", "stop"),
    [("a€b", "€"), ("€€ü.", "ü"), ("\u20ac\u20ad", "\u20ad"), ("<a>🙂</a>b", "</a>"), ("🙂\n🙂", "\n🙂")],
)
def test_stop_strings_of_several_bytes_are_found(tmp_path: Path, answer: str, stop: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_model(tmp_path))  # each token is a byte
    stopped = detokenized(tokenizer, "?", answer, stop)
    assert (stopped.finish_reason, stopped.text) == ("stop", answer.partition(stop)[0])
    assert len(stopped.tokens) == len((stopped.text + stop).encode())


def test_a_stop_string_within_a_special_tokens_text_is_not_meant(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_model(tmp_path))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    stopped = detokenized(tokenizer, "?", "<tool_call>add(1)</tool_call> so call me", "call")
    assert stopped.text == "<tool_call>add(1)</tool_call> so "


def test_a_models_end_token_is_no_text_though_it_is_not_special(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_model(tmp_path))
    tokenizer.add_tokens(["<over>"])  # as generation_config.json may name one
    tokens = tokenizer.encode("42<over>", add_special_tokens=False)
    logprobs: Any = SimpleNamespace(logprobs=[-1.0] * 3)
    sample = CompletionOutput(0, "", tokens, -1.0, logprobs, finish_reason="stop", stop_reason=tokens[-1])
    sample.weight_versions = [SimpleNamespace(version=0, start=0, end=3)]  # pyright: ignore[reportAttributeAccessIssue]
    assert to_completion(sample, tokenizer, None, ends=(tokens[-1],)).text == "42"
    assert to_completion(sample, tokenizer, None).text == "42<over>"  # a token that the caller stops at stays
