"""Samples rollouts ahead of the training steps that learn from them, by a bounded number of steps.

Producer: one task per group, started in the order of the problems as soon as the bound allows. Consumer: the loop,
which gets a step's groups from `take`, and calls `advance` once the generator has the weights of that step. `take`
waits for groups; a finished group unblocks it. Tasks wait to be started; `advance` unblocks them. If a group or the
loop fails, all other groups are cancelled and the exception leaves the `async with` block unchanged, so that
no task waits without end.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rl.checks import check_at_least
from rl.types import Group

_LISTS = ("unfinished", "finished", "started", "finished_groups")


class RolloutQueue:
    """Samples numbered groups, and gives every step the same number of them.

    async with RolloutQueue(sample_group, range(1, 101), groups_per_step=8, max_staleness=1) as rollouts:
        for step in range(1, 101):
            groups = await rollouts.take()
            ...
            rollouts.advance()

    Let s be `max_staleness`. During step t the groups of steps up to t + s may start, and a group is taken at most s
    steps after the step in which it started: `take` returns the oldest finished groups, and waits for a still older
    one only if no later step could take it in time. So the policy that trains on a token is at most s versions ahead of
    the one that sampled it, and no rollout is thrown away. With s = 0 a step takes exactly its own groups, which the
    policy that it updates has sampled.
    """

    def __init__(
        self,
        sample_group: Callable[[int], Awaitable[Group]],
        steps: range,
        groups_per_step: int,
        max_staleness: int,
        state: Mapping[str, Any] | None = None,
        sampled_as: Mapping[str, object] | None = None,
        order: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """`sample_group(n)` samples group n; numbers count from 0 in step 1. `steps` are the remaining steps.

        `state` continues an earlier queue: it is what its method `state` returned before the first of these steps. If
        that queue had another `groups_per_step` or `max_staleness`, or what groups are `sampled_as` (JSON types) was
        another, its groups do not fit: the same numbers are sampled again, so that none is left out.
        `order` says which groups each step takes, as an earlier run took them, in place of the oldest finished ones.
        Raises ValueError for a staleness below 0 and for less than one group per step.
        """
        check_at_least(0, max_staleness=max_staleness)
        check_at_least(1, groups_per_step=groups_per_step)
        self._sample_group = sample_group
        self._steps = steps
        self._sampled_as = sampled_as
        self._order = order
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._step = steps.start
        state = state or {"next": (steps.start - 1) * groups_per_step, **dict.fromkeys(_LISTS, ())}
        if not self._fits(state):
            again = sorted([*state["unfinished"], *state["finished"]])
            state = {**state, **dict.fromkeys(_LISTS, ()), "unfinished": again}
        self._next: int = state["next"]
        self._to_repeat: list[int] = [*state["unfinished"]]  # groups that an earlier queue had started
        self._num_started = len(state["finished"])
        self._started: dict[int, int] = {}  # group -> the step in which it started, until it is taken
        self._started |= zip(state["finished"], state["started"], strict=True)
        self._finished: dict[int, Group] = dict(zip(state["finished"], state["finished_groups"], strict=True))
        self._changed = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._running:
            task.cancel()
        try:
            await self._tasks.__aexit__(kind, error, trace)
            return
        except BaseExceptionGroup as errors:
            cause: BaseException = errors
        while isinstance(cause, BaseExceptionGroup):  # only the first failure: the others are mostly its consequence
            cause = cause.exceptions[0]
        raise cause

    async def take(self) -> list[Group]:
        """The next step's groups, ordered by number. Waits until they have finished; a failed group ends the wait."""
        while (taken := self._choose()) is None:
            self._changed.clear()
            await self._changed.wait()
        for number in taken:
            del self._started[number]
        return [self._finished.pop(number) for number in sorted(taken)]

    def _choose(self) -> list[int] | None:
        """The numbers of the oldest finished groups, unless the rest could then not be taken in time; None to wait."""
        if self._order is not None:
            ordered = [*self._order[self._step]]
            return ordered if self._finished.keys() >= {*ordered} else None
        taken = sorted(self._finished, key=lambda number: (self._started[number], number))[: self._groups_per_step]
        # The last step that may take each remaining group. In this order, later steps take them `groups_per_step` at a
        # time, so the group at `place` is taken in step self._step + 1 + place // groups_per_step.
        left = sorted(self._started[number] + self._max_staleness for number in self._started.keys() - set(taken))
        on_time = all(due > self._step + place // self._groups_per_step for place, due in enumerate(left))
        return taken if len(taken) == self._groups_per_step and on_time else None

    def advance(self) -> None:
        """Begins the next step. Call it once the generator has the weights that the last groups led to."""
        self._step += 1
        self._start()

    def state(self) -> dict[str, Any]:
        """The state from which another queue can continue after the groups last taken: JSON types, and groups.

        It holds the finished groups themselves, not copies, so that it costs nothing to ask after every step; and the
        numbers of the groups that are being sampled, which will start again.
        """
        # A group whose rollouts all failed leaves nothing on disk to be restored from; it is sampled again.
        finished = sorted(number for number, group in self._finished.items() if group.rollouts)
        unfinished = self._started.keys() - set(finished)
        return {
            "groups_per_step": self._groups_per_step,
            "max_staleness": self._max_staleness,
            "sampled_as": self._sampled_as,
            "next": self._next,
            "unfinished": sorted([*self._to_repeat, *unfinished]),
            "finished": finished,
            "started": [self._started[number] for number in finished],
            "finished_groups": [self._finished[number] for number in finished],
        }

    def _start(self) -> None:
        """Starts every group that the bound allows now."""
        num_steps = min(self._step - self._steps.start + 1 + self._max_staleness, len(self._steps))
        count = max(num_steps * self._groups_per_step - self._num_started, 0)
        again, self._to_repeat = self._to_repeat[:count], self._to_repeat[count:]
        new = range(self._next, self._next + count - len(again))
        self._next, self._num_started = new.stop, self._num_started + count
        for number in (*again, *new):
            self._started[number] = self._step
            task = self._tasks.create_task(self._run(number))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(self, number: int) -> None:
        self._finished[number] = await self._sample_group(number)
        self._changed.set()

    def _fits(self, state: Mapping[str, Any]) -> bool:
        """Whether groups of the state can be taken."""
        ours = {
            "groups_per_step": self._groups_per_step,
            "max_staleness": self._max_staleness,
            "sampled_as": self._sampled_as,
        }
        return all(state.get(name) == value for name, value in ours.items())
