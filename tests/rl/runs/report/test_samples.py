"""The token samples of a run, and the pieces of text that tokens are."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from rl.rollouts.episodes import group_to_data
from rl.runs.report import samples
from rl.runs.report.samples import TokenSamples, read_token_samples
from rl.types import ForwardBackwardOutput
from tests.rl.runs.report.reported_runs import group


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
