import asyncio

import pytest

from rl.algorithms.dynamic_sampling import Refill, sample_with_signal
from rl.types import Group
from tests.rl.fakes import completion, single_turn


def _refill(every: int, num_groups: int, max_rounds: int) -> tuple[Refill, list[tuple[int, int]]]:
    """Of a stream in which every so-manieth group has a signal, and how it was asked for."""
    asked: list[tuple[int, int]] = []

    async def sample(start: int, count: int) -> list[Group]:
        asked.append((start, count))
        return [_group(i, 1.0 if i % every == 0 else 0.0) for i in range(start, start + count)]

    return asyncio.run(sample_with_signal(sample, 100, num_groups, max_rounds)), asked


def _group(number: int, reward: float) -> Group:
    rollouts = tuple(single_turn((1,), completion("a"), reward=r) for r in (reward, 0.0))
    return Group(problem_id=str(number), prompt="", rollouts=rollouts)


def test_groups_are_refilled_until_there_are_enough() -> None:
    refill, asked = _refill(every=2, num_groups=4, max_rounds=9)
    assert [group.problem_id for group in refill.groups] == ["100", "102", "104", "106"]
    assert asked == [(100, 4), (104, 2), (106, 1)]
    assert [group.problem_id for group in refill.sampled] == [str(i) for i in range(100, 107)]


def test_rounds_are_limited() -> None:
    refill, asked = _refill(every=1000, num_groups=4, max_rounds=3)
    assert refill.groups == ()
    assert asked == [(100, 4), (104, 4), (108, 4)]


def test_a_full_batch_is_sampled_once() -> None:
    refill, asked = _refill(every=1, num_groups=4, max_rounds=3)
    assert asked == [(100, 4)]
    assert refill.groups == refill.sampled


@pytest.mark.parametrize(("num_groups", "max_rounds", "named"), [(0, 1, "num_groups is 0"), (1, 0, "max_rounds is 0")])
def test_nothing_to_sample_is_a_mistake(num_groups: int, max_rounds: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        _refill(1, num_groups, max_rounds)
