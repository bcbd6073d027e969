"""Rollouts that run ahead of the training steps that learn from them, by a bounded number of steps.

Producer: one task per group, started in the order of the problems as soon as the bound allows. Consumer: the loop,
which gets a step's groups from `take` and says with `advance` that the generator has the weights that came of them.
`take` waits for groups, and a group that finishes unblocks it; a group waits to be started, and `advance` unblocks it.
A group that fails, or the loop, cancels all the others and leaves the `async with` block as it is: nobody waits for
what will not come.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Self

from rl.checks import check_at_least
from rl.rollouts.serialization import group_rows, groups_from_rows
from rl.types import Group


class RolloutQueue:
    """Groups by number, of which every step takes the same count.

    async with RolloutQueue(sample_group, range(1, 101), groups_per_step=8, max_staleness=1) as rollouts:
        for step in range(1, 101):
            groups = await rollouts.take()
            ...
            rollouts.advance()

    Let s be `max_staleness`. Before step t is over, groups of the steps up to t + s may start, and each is taken at
    most s steps after the one in which it started: `take` gives the oldest groups that have finished, and waits for
    older ones only when no later step could take them in time. So the policy that trains on a token is at most s
    versions ahead of the one that sampled it, and no rollout is thrown away. With s = 0 a step takes exactly its own
    groups, sampled by the policy it updates.
    """

    def __init__(
        self,
        sample_group: Callable[[int], Awaitable[Group]],
        steps: range,
        groups_per_step: int,
        max_staleness: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """`sample_group(n)` makes group n, counted from 0 in step 1. `steps` are those still to do; with the `state`
        that another queue had before the first of them, goes on where that was.

        Raises ValueError for a staleness below 0 and for steps without groups.
        """
        check_at_least(0, max_staleness=max_staleness)
        check_at_least(1, groups_per_step=groups_per_step)
        self._sample_group = sample_group
        self._num_groups = (steps.stop - 1) * groups_per_step
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._step = steps.start
        state = state or {"next": (steps.start - 1) * groups_per_step, "unfinished": [], "finished": []}
        self._next: int = state["next"]
        self._again: list[int] = [*state["unfinished"]]
        self._started: dict[int, int] = {}  # group -> the step it started in, until it is taken
        self._finished: dict[int, Group] = {}
        for waiting in state["finished"]:
            (self._finished[waiting["number"]],) = groups_from_rows(waiting["rows"])
            self._started[waiting["number"]] = waiting["started"]
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
        while isinstance(cause, BaseExceptionGroup):  # the first to fail; the others failed of it, or besides
            cause = cause.exceptions[0]
        raise cause

    async def take(self) -> list[Group]:
        """The next step's groups, in the order of their numbers. Waits for them; a failed group ends the wait."""
        while (taken := self._choose()) is None:
            self._changed.clear()
            await self._changed.wait()
        for number in taken:
            del self._started[number]
        return [self._finished.pop(number) for number in sorted(taken)]

    def _choose(self) -> list[int] | None:
        """The oldest finished groups, if no more of those that are left come due than later steps can take."""
        taken = sorted(self._finished, key=lambda number: (self._started[number], number))[: self._groups_per_step]
        left = sorted(self._started[number] + self._max_staleness for number in self._started.keys() - set(taken))
        on_time = all(due > self._step + place // self._groups_per_step for place, due in enumerate(left))
        return taken if len(taken) == self._groups_per_step and on_time else None

    def advance(self) -> None:
        """The generator has the weights that came of the groups last taken: the next step begins."""
        self._step += 1
        self._start()

    def state(self) -> dict[str, Any]:
        """What a queue needs to go on from the groups last taken, in JSON types: groups that wait to be taken, and the
        numbers of those that are being sampled, which start again."""
        unfinished = [number for number in self._started if number not in self._finished]
        waiting = [
            {"number": number, "started": self._started[number], "rows": group_rows(group)}
            for number, group in sorted(self._finished.items())
        ]
        lost = [entry["number"] for entry in waiting if not entry["rows"]]  # the environment failed all of its rollouts
        finished = [entry for entry in waiting if entry["rows"]]
        return {"next": self._next, "unfinished": sorted([*self._again, *unfinished, *lost]), "finished": finished}

    def _start(self) -> None:
        """Starts every group that the bound allows by now."""
        limit = min((self._step + self._max_staleness) * self._groups_per_step, self._num_groups)
        self._again += range(self._next, limit)
        self._next = max(self._next, limit)
        for number in self._again:
            self._started[number] = self._step
            task = self._tasks.create_task(self._run(number))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        self._again = []

    async def _run(self, number: int) -> None:
        self._finished[number] = await self._sample_group(number)
        self._changed.set()
