"""Sides that take turns: what each round measured, and the time that a call took on the clock and on the processors."""

import contextlib
import statistics
import time
from collections.abc import Awaitable, Collection, Mapping
from typing import Any, NamedTuple

import psutil

_TICK_S = 0.01  # the kernel counts CPU time in these


class Time(NamedTuple):
    """What a call took, in seconds."""

    wall: float
    cpu: float
    """CPU time of all processes that this one has started, at least one tick of the kernel's clock."""
    result: Any
    """What the call returned."""


class Rounds:
    """The figures of every round, printed as they come."""

    def __init__(self, part: str, num_rounds: int, *, shown: Collection[str]) -> None:
        """Begins each line with `part`; figures of these names are printed. Round 0 warms up and is not counted."""
        self._part = part
        self._num_rounds = num_rounds
        self._shown = shown
        self._figures: list[Mapping[str, float]] = []

    def add(self, turn: int, figures: Mapping[str, float]) -> None:
        """Takes a round's figures."""
        shown = "   ".join(f"{name} {figures[name]:.3f}" for name in self._shown if name in figures)
        print(f"{self._part:<12}{f'{turn}/{self._num_rounds}' if turn else 'warm-up':<9}{shown}", flush=True)
        if turn:
            self._figures.append(figures)

    def medians(self) -> dict[str, float]:
        """The median of every figure."""
        return {name: statistics.median(each[name] for each in self._figures) for name in self._figures[0]}


async def timed(call: Awaitable[Any]) -> Time:
    """Awaits a call that other processes carry out."""
    wall, cpu = time.perf_counter(), _cpu_seconds()
    result = await call
    return Time(time.perf_counter() - wall, max(_cpu_seconds() - cpu, _TICK_S), result)


def _cpu_seconds() -> float:
    process = psutil.Process()
    ended = process.cpu_times()
    total = ended.children_user + ended.children_system
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:4])  # its own, and that of its children that have ended
    return total
