import asyncio
import copy
import random
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from rl.algorithms.metrics import policy_staleness
from rl.rollouts.queue import RolloutQueue
from rl.types import Group
from tests.rl.fakes import completion, single_turn
from tests.waiting import LIMIT_S

PER_STEP = 3


async def _ticks(count: int) -> None:
    """Waits for iterations of the event loop, so that the order of events does not depend on the machine."""
    for _ in range(count):
        await asyncio.sleep(0)


class Sampler:
    """Samples groups with the version that the test's loop sets. A seed decides how long each takes."""

    def __init__(self, seed: int = 0, fails_at: int | None = None) -> None:
        self.version = 0
        self.started: list[int] = []
        self.cancelled = 0
        self._random = random.Random(seed)
        self._fails_at = fails_at

    async def __call__(self, number: int) -> Group:
        """Occasionally, a group takes as long as many steps."""
        self.started.append(number)
        version = self.version
        try:
            await _ticks(self._random.choice([0, 10, 20, 200]) if number != self._fails_at else 5)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if number == self._fails_at:
            raise ArithmeticError("my own mistake")
        rollout = single_turn((1, 2), completion("ab", version=version), reward=float(number))
        return Group(problem_id=str(number), prompt="", rollouts=(rollout,))


async def _loop(sampler: Sampler, queue: RolloutQueue, steps: range, after: Callable[[int], None]) -> list[list[int]]:
    """The groups that every step trains on. `after` is called with the greatest staleness of each step."""
    taken: list[list[int]] = []
    async with queue as rollouts:
        for step in steps:
            groups = await rollouts.take()
            taken.append([int(group.problem_id) for group in groups])
            staleness = policy_staleness(groups, sampler.version)
            assert staleness["staleness_max"] <= step - 1
            after(int(staleness["staleness_max"]))
            await _ticks(20)
            sampler.version += 1
            rollouts.advance()
    return taken


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_no_token_is_older_than_the_bound_and_none_is_lost(max_staleness: int, seed: int) -> None:
    steps, sampler, staleness = range(1, 21), Sampler(seed), list[int]()

    async def run() -> list[list[int]]:
        return await _loop(sampler, RolloutQueue(sampler, steps, PER_STEP, max_staleness), steps, staleness.append)

    taken = asyncio.run(run())
    assert sorted(number for numbers in taken for number in numbers) == list(range(20 * PER_STEP))
    assert all(len(numbers) == PER_STEP for numbers in taken)
    assert sampler.started == list(range(20 * PER_STEP))
    assert max(staleness) == max_staleness  # the bound is kept, and reached


def test_without_staleness_every_step_has_its_own_groups() -> None:
    steps, sampler = range(1, 6), Sampler()

    async def run() -> list[list[int]]:
        return await _loop(sampler, RolloutQueue(sampler, steps, PER_STEP, 0), steps, lambda _: None)

    assert asyncio.run(run()) == [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(5)]


def test_a_step_does_not_wait_for_a_slow_group_before_it_must() -> None:
    release = asyncio.Event()

    async def sample_group(number: int) -> Group:
        if number == 0:
            await release.wait()
        return Group(problem_id=str(number), prompt="", rollouts=())

    async def run() -> None:
        async with RolloutQueue(sample_group, range(1, 9), PER_STEP, 2) as rollouts:
            for expected in ([1, 2, 3], [4, 5, 6]):
                assert [int(group.problem_id) for group in await rollouts.take()] == expected
                rollouts.advance()
            waiting = asyncio.create_task(rollouts.take())
            await _ticks(50)
            assert not waiting.done()
            release.set()
            assert [int(group.problem_id) for group in await waiting] == [0, 7, 8]

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def test_a_failed_group_ends_the_loop_with_its_own_traceback() -> None:
    steps, sampler = range(1, 100), Sampler(fails_at=7)

    async def run() -> None:
        await _loop(sampler, RolloutQueue(sampler, steps, PER_STEP, 2), steps, lambda _: None)

    with pytest.raises(ArithmeticError, match="my own mistake") as caught:
        asyncio.run(asyncio.wait_for(run(), LIMIT_S))
    assert traceback.extract_tb(caught.value.__traceback__)[-1].line == 'raise ArithmeticError("my own mistake")'
    assert sampler.cancelled > 0


def test_a_failed_loop_cancels_the_groups() -> None:
    sampler = Sampler()

    def after(_lag: int) -> None:
        raise KeyError("the trainer")

    async def run() -> None:
        await _loop(sampler, RolloutQueue(sampler, range(1, 100), PER_STEP, 5), range(1, 100), after)

    with pytest.raises(KeyError, match="the trainer"):
        asyncio.run(asyncio.wait_for(run(), LIMIT_S))
    assert sampler.cancelled > 0


def test_a_cancelled_loop_is_cancelled() -> None:
    sampler = Sampler()

    async def run() -> None:
        queue = RolloutQueue(sampler, range(1, 100), PER_STEP, 5)
        task = asyncio.create_task(_loop(sampler, queue, range(1, 100), lambda _: None))
        await _ticks(50)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def test_a_queue_continues_from_the_state_of_another() -> None:
    first, second = range(1, 5), range(5, 11)
    sampler = Sampler(seed=1)

    async def run() -> list[list[int]]:
        queue = RolloutQueue(sampler, range(1, 11), PER_STEP, 3)
        taken: list[list[int]] = []
        state: dict[str, Any] = {}
        async with queue as rollouts:
            for _ in first:
                taken.append([int(group.problem_id) for group in await rollouts.take()])
                await _ticks(60)
                sampler.version += 1
                rollouts.advance()
                state = rollouts.state()
        assert state["finished"]
        assert state["unfinished"]
        again = Sampler()
        again.version = sampler.version
        staleness: list[int] = []
        taken += await _loop(again, RolloutQueue(again, second, PER_STEP, 3, state), second, staleness.append)
        assert max(staleness) <= 3
        assert set(state["finished"]).isdisjoint(again.started)  # finished groups are not sampled again
        return taken

    taken = asyncio.run(run())
    assert sorted(number for numbers in taken for number in numbers) == list(range(10 * PER_STEP))


@pytest.mark.parametrize(
    ("per_step", "max_staleness"), [(PER_STEP, 1), (PER_STEP, 4), (PER_STEP + 1, 3), (2, 3), (2, 0)]
)
def test_a_queue_with_other_numbers_samples_what_waited_again(per_step: int, max_staleness: int) -> None:
    assert_none_is_left_out(per_step, max_staleness, "same")


@pytest.mark.stranger("2.C3")
def test_groups_that_wait_are_sampled_again_where_they_would_be_sampled_otherwise() -> None:
    assert_none_is_left_out(PER_STEP, 3, "other")


def assert_none_is_left_out(per_step: int, max_staleness: int, sampled_as: str) -> None:
    sampler, again = Sampler(seed=1), Sampler()

    async def run() -> list[list[int]]:
        async with RolloutQueue(sampler, range(1, 11), PER_STEP, 3, sampled_as={"env": "same"}) as rollouts:
            first = await rollouts.take()
            await _ticks(60)
            rollouts.advance()
            state = rollouts.state()
        steps = range(2, 7)
        queue = RolloutQueue(again, steps, per_step, max_staleness, state, {"env": sampled_as})
        return [[int(group.problem_id) for group in first], *await _loop(again, queue, steps, lambda _: None)]

    taken = [number for numbers in asyncio.run(asyncio.wait_for(run(), LIMIT_S)) for number in numbers]
    assert sorted(taken) == list(range(PER_STEP + 5 * per_step))
    assert {*again.started} == {*taken[PER_STEP:]}, "none of them is the earlier queue's"


def test_the_state_holds_the_groups_themselves() -> None:
    """A loop asks for it after every step, and what it was then is saved when a signal ends a later step."""
    sampler, given = Sampler(), list[Group]()

    async def sample_group(number: int) -> Group:
        given.append(await sampler(number))
        return given[-1]

    async def run() -> None:
        async with RolloutQueue(sample_group, range(1, 4), PER_STEP, 1) as rollouts:
            await rollouts.take()
            rollouts.advance()
            await _ticks(300)
            state = rollouts.state()
            before = copy.deepcopy(state)
            assert all(any(group is g for g in given) for group in state["finished_groups"])
            assert [int(group.problem_id) for group in state["finished_groups"]] == state["finished"] != []
            await rollouts.take()
            rollouts.advance()
            assert state == before

    asyncio.run(run())


def test_a_group_whose_rollouts_all_failed_is_sampled_again() -> None:
    """A file of rollouts has no row for it."""

    async def sample_group(number: int) -> Group:
        failed = number == PER_STEP
        rollouts = () if failed else (single_turn((1, 2), completion("ab"), reward=1.0),)
        return Group(problem_id=str(number), prompt="", rollouts=rollouts, failures=("hung",) * failed)

    async def run() -> None:
        async with RolloutQueue(sample_group, range(1, 3), PER_STEP, 1) as rollouts:
            await rollouts.take()
            rollouts.advance()
            await _ticks(50)
            state = rollouts.state()
            assert state["unfinished"] == [PER_STEP]
            assert state["finished"] == list(range(PER_STEP + 1, 2 * PER_STEP))

    asyncio.run(run())


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="max_staleness is -1; it must be at least 0"):
        RolloutQueue(Sampler(), range(1, 3), PER_STEP, -1)
    with pytest.raises(ValueError, match="groups_per_step is 0"):
        RolloutQueue(Sampler(), range(1, 3), 0, 1)


def test_groups_are_taken_in_an_order_that_is_given() -> None:
    async def run() -> list[list[int]]:
        sampler = Sampler(seed=3)
        queue = RolloutQueue(sampler, range(1, 4), PER_STEP, max_staleness=1, order=order)
        return await _loop(sampler, queue, range(1, 4), lambda _: None)

    order = {1: [1, 2, 5], 2: [3, 0, 7], 3: [8, 4, 6]}
    assert asyncio.run(asyncio.wait_for(run(), LIMIT_S)) == [[1, 2, 5], [0, 3, 7], [4, 6, 8]]
