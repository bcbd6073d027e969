from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.algorithms.shaping import (
    groups_with_signal,
    not_truncated,
    shape_rewards,
    soft_overlong_punishment,
    unshaped,
)
from rl.types import Completion, Group, Rollout
from tests.rl.fakes import completion, single_turn


def _rollout(num_tokens: int, reward: float = 1.0, **metrics: float) -> Rollout:
    return single_turn((1,), completion("x" * num_tokens), reward=reward, metrics=metrics)


def _group(*rollouts: Rollout) -> Group:
    return Group(problem_id="p", prompt="p", rollouts=rollouts)


def test_shaping_adds_to_the_reward_and_keeps_the_environments() -> None:
    group = shape_rewards(
        _group(_rollout(2, 1.0, turns=3), _rollout(0, -1.0)), lambda rollout: -0.25 * rollout.num_sampled_tokens
    )
    assert group.rewards.tolist() == [0.5, -1.0]
    assert [rollout.metrics for rollout in group.rollouts] == [
        {"unshaped_reward": 1.0, "turns": 3},
        {"unshaped_reward": -1.0},
    ]
    twice = shape_rewards(group, lambda rollout: -1.0 * rollout.num_sampled_tokens)
    assert twice.rollouts[0].metrics["unshaped_reward"] == 1.0
    assert twice.rewards.tolist() == [-1.5, -1.0]
    assert unshaped(twice) == unshaped(group) == _group(_rollout(2, 1.0, turns=3), _rollout(0, -1.0))


@given(st.integers(0, 40), st.integers(1, 20), st.integers(0, 20))
@settings(deadline=None)
def test_overlong_punishment_is_that_of_dapo(num_tokens: int, cache: int, rest: int) -> None:
    limit = cache + rest
    if num_tokens <= limit - cache:
        expected = 0.0
    elif num_tokens <= limit:
        expected = ((limit - cache) - num_tokens) / cache
    else:
        expected = -1.0
    assert soft_overlong_punishment(limit, cache)(_rollout(num_tokens)) == pytest.approx(expected)


def test_overlong_punishment_is_for_a_turn_that_is_too_long() -> None:
    turn = _rollout(200).turns[0]
    long = replace(turn, completion=completion("x" * 448))
    penalty = soft_overlong_punishment(512, 128)
    assert penalty(Rollout(turns=(turn, turn, turn), reward=1.0)) == 0
    assert penalty(Rollout(turns=(turn, long, turn), reward=1.0)) == -0.5


def test_truncated_completions_are_told_from_finished_ones() -> None:
    cut = Completion(tokens=(1,), logprobs=(-1.0,), versions=(0,), text="a", finish_reason="length")
    assert not not_truncated(single_turn((1,), cut, reward=0.0))
    assert not_truncated(_rollout(1))


def test_groups_without_signal_are_left_out() -> None:
    equal = _group(*[_rollout(1, 0.1)] * 3)
    mixed = _group(_rollout(1, 0.1), _rollout(1, 0.2))
    assert groups_with_signal([equal, mixed, _group(_rollout(1))]) == [mixed]


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (soft_overlong_punishment, {"max_tokens": 8, "cache": 0}, "cache is 0; it must be at least 1"),
        (soft_overlong_punishment, {"max_tokens": 8, "cache": 9}, "cache is 9; it must not exceed max_tokens 8"),
    ],
)
def test_mistakes_are_named(make: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**arguments)
