"""The texts of a report: answers of each evaluation, training answers with both sides' log-probs, trees of sessions."""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from controller.runs.folder import CONFIG_FILE, SESSIONS
from controller.runs.models import resolve_model
from controller.runs.recording import recorded_files
from ownloop_report.token_gradients import token_gradients
from rl.images import images_of
from rl.rollouts.columns import read_groups, table_to_groups
from rl.system.disk import read_json, write_whole
from rl.types import Datum, ForwardBackwardOutput, Rollout

Decode = Callable[[Sequence[int]], str]
"""Tokens -> text, special tokens included."""

TOKEN_SAMPLES = "token_samples.json"
_MAX_EVALUATIONS = 6
_MAX_PROBLEMS = 8
_MAX_TOKENS = 400
_MAX_PICTURE_BYTES = 200_000
_MAX_STEPS = 6
_PER_STEP = 3
_MAX_SESSIONS = 3
_MAX_CALLS = 60
_MAX_CHARACTERS = 4000  # of one message
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
                new: dict[str, object] = {"prompt": group.prompt, "images": _pictures(group.rollouts[0]), "answers": []}
                entry = problems.setdefault(group.problem_id, new)
                entry["answers"].append({"step": step, **_answer(group.rollouts[0], decode)})
    return list(problems.values())


def _pictures(rollout: Rollout) -> list[str]:
    """The images of the prompt as data URLs; browsers find out their format. Large ones are left out."""
    files = [image.data for image in images_of(rollout.turns[0].prompt_tokens)]
    return [
        f"data:image/*;base64,{base64.b64encode(file).decode()}" for file in files if len(file) <= _MAX_PICTURE_BYTES
    ]


def _answer(rollout: Rollout, decode: Decode | None) -> dict[str, object]:
    """The whole text, and its pieces in order.

    A piece is [text of a sampled token, its log-prob], [message of the environment between two turns, null], or,
    without `decode`, [text of a turn].
    """
    pieces: list[Sequence[object]] = []
    num_left = _MAX_TOKENS
    for turn in rollout.turns:
        if turn is not rollout.turns[0]:
            pieces.append((turn.prompt or (decode(turn.prompt_tokens) if decode else ""), None))
        if decode is None:
            pieces.append((turn.completion.text,))
            continue
        shown = turn.completion.tokens[:num_left]
        logprobs = (round(p, 4) for p in turn.completion.logprobs)
        pieces += [*zip(_pieces(shown, decode), logprobs, strict=False)]
        num_left -= len(shown)
        if num_left == 0 and (more := rollout.num_sampled_tokens - _MAX_TOKENS):
            pieces.append((f" ... and {more} more tokens",))
            break
    return {"reward": rollout.reward, "text": rollout.text, "tokens": pieces}


class TokenSamples:
    """Some answers of the latest steps with the log-probs of trainer and generator, in `token_samples.json`."""

    def __init__(self, run: Path, last_step: int) -> None:
        """A run that is resumed after `last_step` keeps the samples up to that step."""
        self.file = run / TOKEN_SAMPLES
        self._samples = [sample for sample in read_token_samples(run) if sample["step"] <= last_step]

    def add(
        self,
        step: int,
        batch: Sequence[Datum],
        output: ForwardBackwardOutput,
        config: Mapping[str, object] | None = None,
    ) -> None:
        """Keeps a few datums of a step. Does nothing for a batch without the generator's log-probs.

        With the run's `config`, it also keeps what each token does to the gradient, where the loss tells.
        """
        if not all("logprobs" in datum.loss_inputs for datum in batch):
            return
        gradients = token_gradients(batch, output.logprobs, config or {}) or [None] * len(batch)
        for datum, p, gradient in [*zip(batch, output.logprobs, gradients, strict=True)][:_PER_STEP]:
            scored = np.flatnonzero(datum.counted)
            span = slice(scored[0], min(scored[-1] + 1, scored[0] + _MAX_TOKENS)) if len(scored) else slice(0)
            sampled = datum.counted[span]
            sides = (np.round(np.asarray(column, float)[span], 5) for column in (p, datum.loss_inputs["logprobs"]))
            trainer, generator = (
                [x if was_sampled else None for x, was_sampled in zip(side.tolist(), sampled, strict=True)]
                for side in sides
            )
            tokens = datum.loss_inputs["target_tokens"][span].tolist()
            kept = {"step": step, "tokens": tokens, "trainer": trainer, "generator": generator}
            if gradient is not None:
                share, clipped = gradient
                kept |= {"share": np.round(share[span].astype(float), 9).tolist(), "clipped": clipped[span].tolist()}
            self._samples.append(kept)
        kept = sorted({sample["step"] for sample in self._samples})[-_MAX_STEPS:]
        self._samples = [sample for sample in self._samples if sample["step"] in kept]

    def write(self) -> None:
        """Writes the file. Raises `RecordingError`."""
        write_whole(self.file, json.dumps(self._samples).encode())


def session_trees(run: Path) -> list[dict[str, Any]]:
    """A few sessions of the latest step: the best, the worst, and the one with most branches. Empty without sessions.

    Each has its calls in order, with the index of the call that it continues.
    """
    files = recorded_files(run / SESSIONS, "step")
    if not files:
        return []
    _, step, file = files[-1]
    table = pq.read_table(file)
    rows = table.drop_columns(["turns"]).to_pylist()
    played = [rollout for group in table_to_groups(table) for rollout in group.rollouts]
    by_reward = sorted(range(len(rows)), key=lambda index: rows[index]["reward"])
    widest = max(by_reward, key=lambda index: rows[index]["parent"].count(None) + _num_forks(rows[index]["parent"]))
    chosen = [*dict.fromkeys((by_reward[-1], by_reward[0], widest))][:_MAX_SESSIONS]
    return [{"step": step, **_session(rows[index], played[index])} for index in chosen]


def _num_forks(parents: Sequence[int | None]) -> int:
    return len([parent for parent in parents if parent is not None]) - len({*parents} - {None})


def _session(row: Mapping[str, Any], played: Rollout) -> dict[str, object]:
    calls: list[dict[str, object]] = []
    for index, turn in enumerate(played.turns[:_MAX_CALLS]):
        calls.append(
            {
                **{name: row[name][index] for name in ("parent", "how", "label", "trained")},
                "read": turn.prompt[:_MAX_CHARACTERS],
                "num_read": len(turn.prompt_tokens),
                "said": turn.completion.text[:_MAX_CHARACTERS],
                "num_said": len(turn.completion.tokens),
            }
        )
    names = ("id", "prompt", "reward", "ended_by", "output")
    return {**{name: row[name] for name in names}, "calls": calls, "num_calls": len(played.turns)}


def read_token_samples(run: Path) -> list[dict[str, Any]]:
    """What `TokenSamples` wrote; none without a file."""
    file = run / TOKEN_SAMPLES
    return json.loads(file.read_bytes()) if file.is_file() else []


def mismatch_samples(run: Path, decode: Decode | None) -> list[dict[str, Any]]:
    """The recorded answers as [text, trainer's log-prob, generator's log-prob] of each token, the latest step first.

    Where they are known, the token's share of the step's gradient and whether it is clipped follow. Both log-probs of a
    message of the environment are null.
    """
    return [
        {"step": sample["step"], "tokens": _both_sides(sample, decode)} for sample in reversed(read_token_samples(run))
    ]


def _both_sides(sample: Mapping[str, Any], decode: Decode | None) -> list[tuple[object, ...]]:
    texts = _pieces(sample["tokens"], decode) if decode else [f"{token} " for token in sample["tokens"]]
    rows: list[tuple[object, ...]] = []
    columns = [sample[name] for name in ("trainer", "generator", "share", "clipped") if name in sample]
    for text, ours, *others in zip(texts, *columns, strict=True):
        if ours is not None:
            rows.append((text, ours, *others))
        elif rows and rows[-1][1] is None:
            rows[-1] = (rows[-1][0] + text, None, None)
        else:
            rows.append((text, None, None))
    return rows


def _pieces(tokens: Sequence[int], decode: Decode) -> list[str]:
    """The text that each token adds."""
    pieces: list[str] = []
    for end in range(len(tokens)):
        start = max(0, end - _CONTEXT)
        before, after = decode(tokens[start:end]), decode(tokens[start : end + 1])
        pieces.append(after[len(before) :] if after.startswith(before) else decode([tokens[end]]))
    return pieces


def decoder_of(run: Path) -> Callable[[Sequence[int]], str] | None:
    """Tokens -> text, special tokens included; None if the run's model is not here or has another kind of tokenizer."""
    try:
        config = read_json(run / CONFIG_FILE)
        return _decoder(resolve_model(str(config["model"])) / "tokenizer.json")
    except (ValueError, KeyError, OSError):
        return None


@lru_cache(maxsize=1)
def _decoder(file: Path) -> Callable[[Sequence[int]], str] | None:
    from tokenizers import Tokenizer

    if not file.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(file))

    def decode(tokens: Sequence[int]) -> str:
        return tokenizer.decode([*tokens], skip_special_tokens=False)

    return decode
