"""The texts of a report: answers of each evaluation side by side, and training answers with both sides' log-probs."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl.rollouts.columns import read_groups
from rl.runs.recording import recorded_files, write_whole
from rl.types import Datum, ForwardBackwardOutput, Rollout

Decode = Callable[[Sequence[int]], str]
"""Tokens -> text, special tokens included."""

TOKEN_SAMPLES = "token_samples.json"
_MAX_EVALUATIONS = 6
_MAX_PROBLEMS = 8
_MAX_TOKENS = 400
_MAX_STEPS = 6
_PER_STEP = 3
_CONTEXT = 4  # tokens before a token, with which it is decoded: alone, its leading blank may be lost


def evaluation_samples(rollouts: Path, decode: Decode | None) -> list[dict[str, Any]]:
    """Problems of the evaluations, each with its first answer in the first evaluation and in the latest ones."""
    by_step = {step: file for _, step, file in recorded_files(rollouts, "eval")}
    steps = sorted(by_step)
    shown = steps if len(steps) <= _MAX_EVALUATIONS else [steps[0], *steps[1 - _MAX_EVALUATIONS :]]
    problems: dict[str, dict[str, Any]] = {}
    for step in shown:
        for group in read_groups(by_step[step])[: 4 * _MAX_PROBLEMS]:
            if group.rollouts and (group.problem_id in problems or len(problems) < _MAX_PROBLEMS):
                entry = problems.setdefault(group.problem_id, {"prompt": group.prompt, "answers": []})
                entry["answers"].append({"step": step, **_answer(group.rollouts[0], decode)})
    return list(problems.values())


def _answer(rollout: Rollout, decode: Decode | None) -> dict[str, Any]:
    """The text of all turns, and the pieces of text that its tokens are, each with its log-prob."""
    completions = [turn.completion for turn in rollout.turns]
    tokens = [piece for completion in completions for piece in _pieces(completion.tokens, decode)]
    logprobs = [round(p, 4) for completion in completions for p in completion.logprobs]
    return {
        "reward": rollout.reward,
        "text": "\n".join(completion.text for completion in completions),
        "tokens": [*zip(tokens, logprobs, strict=False)][:_MAX_TOKENS],
    }


class TokenSamples:
    """Some answers of the latest steps with the log-probs of trainer and generator, in `token_samples.json`."""

    def __init__(self, run: Path, last_step: int) -> None:
        """Goes on with those of a run that is resumed after `last_step`."""
        self.file = run / TOKEN_SAMPLES
        self._samples = [sample for sample in read_token_samples(run) if sample["step"] <= last_step]

    def add(self, step: int, batch: Sequence[Datum], output: ForwardBackwardOutput) -> None:
        """Keeps a few datums of a step. Does nothing for a batch without the generator's log-probs."""
        if not all("logprobs" in datum.loss_inputs for datum in batch):
            return
        for datum, p in [*zip(batch, output.logprobs, strict=True)][:_PER_STEP]:
            scored = np.flatnonzero(datum.counted)[:_MAX_TOKENS]
            columns = (datum.loss_inputs["target_tokens"], p, datum.loss_inputs["logprobs"])
            tokens, ours, theirs = (np.asarray(column)[scored] for column in columns)
            self._samples.append(
                {
                    "step": step,
                    "tokens": tokens.tolist(),
                    "trainer": np.round(ours.astype(float), 5).tolist(),
                    "generator": np.round(theirs.astype(float), 5).tolist(),
                }
            )
        kept = sorted({sample["step"] for sample in self._samples})[-_MAX_STEPS:]
        self._samples = [sample for sample in self._samples if sample["step"] in kept]

    def write(self) -> None:
        """Writes the file. Raises `RecordingError`."""
        write_whole(self.file, json.dumps(self._samples).encode())


def read_token_samples(run: Path) -> list[dict[str, Any]]:
    """What `TokenSamples` wrote; none without a file."""
    file = run / TOKEN_SAMPLES
    return json.loads(file.read_bytes()) if file.is_file() else []


def mismatch_samples(run: Path, decode: Decode | None) -> list[dict[str, Any]]:
    """The recorded answers as [text, trainer's log-prob, generator's log-prob] of each token, the latest step first."""
    return [
        {"step": sample["step"], "tokens": [*zip(_texts(sample, decode), *_sides(sample), strict=True)]}
        for sample in reversed(read_token_samples(run))
    ]


def _texts(sample: Mapping[str, Any], decode: Decode | None) -> list[str]:
    return _pieces(sample["tokens"], decode) if decode else [f"{token} " for token in sample["tokens"]]


def _sides(sample: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    return sample["trainer"], sample["generator"]


def _pieces(tokens: Sequence[int], decode: Decode | None) -> list[str]:
    """The text that each token adds; none without `decode`."""
    if decode is None:
        return []
    pieces: list[str] = []
    for end in range(min(len(tokens), _MAX_TOKENS)):
        start = max(0, end - _CONTEXT)
        before, after = decode(tokens[start:end]), decode(tokens[start : end + 1])
        pieces.append(after[len(before) :] if after.startswith(before) else decode([tokens[end]]))
    return pieces
