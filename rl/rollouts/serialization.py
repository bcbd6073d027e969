"""Rollouts to JSON rows and back: all that the trainer learns from, and text for a reader."""

from collections.abc import Mapping, Sequence
from typing import Any

from rl.types import Completion, Group, Rollout, Turn


def group_rows(group: Group) -> list[dict[str, Any]]:
    """One row per rollout. A group without rollouts, because all of them failed, has no rows."""
    return [
        {
            "problem_id": group.problem_id,
            "sample": sample,
            "reward": rollout.reward,
            "prompt": group.prompt,
            "completion": rollout.text,
            "truncated": rollout.truncated,
            "group_failures": group.failures,
            "metrics": dict(rollout.metrics),
            "timings": {"seconds_environment": rollout.environment_s},
            "turns": [_turn_row(turn) for turn in rollout.turns],
        }
        for sample, rollout in enumerate(group.rollouts)
    ]


def groups_from_rows(rows: Sequence[Mapping[str, Any]]) -> list[Group]:
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


def _turn_row(turn: Turn) -> dict[str, Any]:
    """A turn without its prompt as text, which the tokens contain."""
    completion = turn.completion
    return {
        "prompt_tokens": turn.prompt_tokens,
        "tokens": completion.tokens,
        "logprobs": completion.logprobs,
        "versions": completion.versions,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
    }


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
