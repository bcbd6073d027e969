"""Reads `rollouts.jsonl`, in which runs of schema version 2 and earlier recorded their rollouts, one line each."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.data.rows import no_fault, parse_row
from rl.types import Completion, Group, Rollout, Turn

_FIELDS = (
    "step",
    "split",
    "problem_id",
    "sample",
    "reward",
    "prompt",
    "truncated",
    "group_failures",
    "metrics",
    "turns",
)


def read_lines(file: Path) -> dict[int, list[Group]]:
    """Step -> the groups that it trained on. A last line without line break is dropped: the run was killed writing it.

    Raises ValueError if the file is missing, and for a line that is not a recorded rollout.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the recording {file} cannot be read: {error.strerror}") from None
    rows: dict[int, list[Mapping[str, Any]]] = {}
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        row = parse_row(line, f"{file}:{number}", dict.fromkeys(_FIELDS, no_fault))
        if row["split"] == "train":
            rows.setdefault(row["step"], []).append(row)
    return {step: _groups(step_rows) for step, step_rows in rows.items()}


def _groups(rows: Sequence[Mapping[str, Any]]) -> list[Group]:
    """The groups that the rows were made from, in order. Only the text of the environment's replies is lost."""
    groups: list[list[Mapping[str, Any]]] = []
    for row in rows:
        if row["sample"] == 0:  # rows of a group are numbered from 0, and consecutive groups may have the same id
            groups.append([])
        groups[-1].append(row)
    return [
        Group(
            problem_id=rows[0]["problem_id"],
            prompt=rows[0]["prompt"],
            rollouts=tuple(_rollout(row) for row in rows),
            failures=tuple(rows[0]["group_failures"]),
        )
        for rows in groups
    ]


def _rollout(row: Mapping[str, Any]) -> Rollout:
    turns = tuple(_turn(turn) for turn in row["turns"])
    return Rollout(
        turns=turns,
        reward=row["reward"],
        metrics=row["metrics"],
        # Not recorded itself: a truncated rollout whose last turn is complete can only have run out of context.
        out_of_context=row["truncated"] and not turns[-1].completion.truncated,
        environment_s=row["timings"]["seconds_environment"],
    )


def _turn(row: Mapping[str, Any]) -> Turn:
    return Turn(
        prompt_tokens=tuple(row["prompt_tokens"]),
        completion=Completion(
            tokens=tuple(row["tokens"]),
            logprobs=tuple(row["logprobs"]),
            versions=tuple(row["versions"]),
            text=row["text"],
            finish_reason=row["finish_reason"],
        ),
    )
