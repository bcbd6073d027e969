"""The token samples of a run, and the pieces of text that tokens are."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from controller.runs.recording import write_rollouts
from ownloop_report import samples
from ownloop_report.samples import TokenSamples, evaluation_samples, mismatch_samples, read_token_samples
from plugins.report.tests.reported_runs import dialogue, group
from rl.images import PlacedImage, TokensWithImages
from rl.rollouts.episodes import group_to_data, rollout_to_datum
from rl.types import ForwardBackwardOutput


def _add(kept: TokenSamples, step: int) -> None:
    batch = group_to_data(group("p", "ab", "cd"), lambda rewards: rewards)
    output = ForwardBackwardOutput(
        logprobs=tuple(np.full(len(datum.tokens), -1.5, np.float32) for datum in batch), entropy=None, metrics={}
    )
    kept.add(step, batch, output)


def test_the_latest_steps_are_kept_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    kept = TokenSamples(tmp_path, 0)
    for step in range(1, 10):
        _add(kept, step)
    kept.write()
    assert sorted({sample["step"] for sample in read_token_samples(tmp_path)}) == [4, 5, 6, 7, 8, 9]
    resumed = TokenSamples(tmp_path, 5)
    _add(resumed, 6)
    resumed.write()
    found = read_token_samples(tmp_path)
    assert [sample["step"] for sample in found] == [4, 4, 5, 5, 6, 6]
    assert found[0] == {"step": 4, "tokens": [97, 98], "trainer": [-1.5, -1.5], "generator": [-1.0, -1.0]}


def _decode(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


@pytest.mark.stranger("F6")
def test_turns_are_apart_with_the_environments_message_between(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "eval-00000.parquet", [dialogue("p")], step=0, split="eval")
    (with_tokens,), (without,) = (evaluation_samples(tmp_path, decode)[0]["answers"] for decode in (_decode, None))
    assert with_tokens["text"] == without["text"] == "first\nno, again\nsecond"
    assert with_tokens["tokens"] == [*((c, -1) for c in "first"), ("no, again", None), *((c, -1) for c in "second")]
    assert without["tokens"] == [("first",), ("no, again", None), ("second",)]


def test_images_of_prompts_are_shown(tmp_path: Path) -> None:
    asked = group("p", "red")
    images = [PlacedImage(start=0, num_tokens=1, data=data, inputs={}) for data in (b"PNG", b"x" * 300_000)]
    turn = replace(asked.rollouts[0].turns[0], prompt_tokens=TokensWithImages((5, 5), images))
    shown = replace(asked, rollouts=(replace(asked.rollouts[0], turns=(turn,)),))
    write_rollouts(tmp_path / "eval-00000.parquet", [shown, group("q", "blue")], step=0, split="eval")
    assert [each["images"] for each in evaluation_samples(tmp_path, None)] == [["data:image/*;base64,UE5H"], []]


@pytest.mark.stranger("F6")
def test_a_message_is_between_the_tokens_of_both_sides(tmp_path: Path) -> None:
    kept = TokenSamples(tmp_path, 0)
    batch = [rollout_to_datum(dialogue("p").rollouts[0], 1.0)]
    logprobs = np.full(len(batch[0].tokens), -1.5, np.float32)
    kept.add(1, batch, ForwardBackwardOutput(logprobs=(logprobs,), entropy=None, metrics={}))
    kept.write()
    (sample,) = mismatch_samples(tmp_path, _decode)
    turns = [[(c, -1.5, -1.0) for c in text] for text in ("first", "second")]
    assert sample["tokens"] == [*turns[0], ("no", None, None), *turns[1]]


@pytest.mark.stranger("F6")
def test_tokens_left_out_of_a_long_answer_are_counted(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "eval-00000.parquet", [group("p", "x" * 1000)], step=0, split="eval")
    tokens = evaluation_samples(tmp_path, _decode)[0]["answers"][0]["tokens"]
    assert tokens == [*[("x", -1.0)] * 400, (" ... and 600 more tokens",)]


def test_pieces_of_real_tokens_make_up_the_text(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = "Ein schöner Tag 🎉: 1 + 23 = 24\n\n  done<|im_end|>"

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(tokens))

    tokens = tokenizer.encode(text)
    pieces = samples._pieces(tokens, decode)  # pyright: ignore[reportPrivateUsage]
    assert len(pieces) == len(tokens)
    assert "".join(pieces).replace("�", "") == text.replace("🎉", "")  # an emoji is several tokens, none a character
    assert pieces[-1] == "<|im_end|>"
