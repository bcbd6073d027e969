"""Rollouts as lines of JSON, and back: everything that a trainer learns from, and what a reader wants to see."""

from collections.abc import Mapping, Sequence
from typing import Any

from rl.types import Completion, Group, Rollout, Turn


def group_rows(group: Group) -> list[dict[str, Any]]:
    """One row per rollout. A group whose rollouts the environment all failed has none."""
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
    """The groups that the rows were made of, in their order; only the text of later turns' messages is not kept."""
    groups: list[list[Mapping[str, Any]]] = []
    for row in rows:
        if row["sample"] == 0:
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
    """Everything of a turn but the prompt's text, which the tokens hold."""
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
