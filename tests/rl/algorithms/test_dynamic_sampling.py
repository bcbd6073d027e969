import asyncio

import pytest

from rl.algorithms.shaping import SampledGroups, sample_with_signal
from rl.types import Group
from tests.rl.fakes import completion, single_turn


def _sample(every: int, num_groups: int, max_rounds: int) -> tuple[SampledGroups, list[tuple[int, int]]]:
    """Samples a stream in which one in `every` groups has a signal; also the (start, count) of each request."""
    asked: list[tuple[int, int]] = []

    async def sample(start: int, count: int) -> list[Group]:
        asked.append((start, count))
        return [_group(i, 1.0 if i % every == 0 else 0.0) for i in range(start, start + count)]

    return asyncio.run(sample_with_signal(sample, 100, num_groups, max_rounds)), asked


def _group(number: int, reward: float) -> Group:
    rollouts = tuple(single_turn((1,), completion("a"), reward=r) for r in (reward, 0.0))
    return Group(problem_id=str(number), prompt="", rollouts=rollouts)


def test_groups_are_sampled_until_enough_have_a_signal() -> None:
    sampled, asked = _sample(every=2, num_groups=4, max_rounds=9)
    assert [group.problem_id for group in sampled.with_signal] == ["100", "102", "104", "106"]
    assert asked == [(100, 4), (104, 2), (106, 1)]
    assert [group.problem_id for group in sampled.all] == [str(i) for i in range(100, 107)]


def test_rounds_are_limited() -> None:
    sampled, asked = _sample(every=1000, num_groups=4, max_rounds=3)
    assert sampled.with_signal == ()
    assert asked == [(100, 4), (104, 4), (108, 4)]


def test_a_full_batch_is_sampled_once() -> None:
    sampled, asked = _sample(every=1, num_groups=4, max_rounds=3)
    assert asked == [(100, 4)]
    assert sampled.with_signal == sampled.all


@pytest.mark.parametrize(("num_groups", "max_rounds", "named"), [(0, 1, "num_groups is 0"), (1, 0, "max_rounds is 0")])
def test_zero_groups_or_rounds_are_refused(num_groups: int, max_rounds: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        _sample(1, num_groups, max_rounds)
