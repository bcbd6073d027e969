"""The timeline of a run, in `timeline.json`, and the progress of long work.

`timeline.json` has phases of the loop and calls of its processes, in Chrome's trace format. It opens in Perfetto
(https://ui.perfetto.dev) and chrome://tracing. The format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

`with span("trainer", "optim_step"): ...` measures a block. It is recorded if the code runs below a loop whose
`Timeline` is active, and costs a microsecond if not. The times are the controller's: a call lasts from the
request to its answer. Spans of one process that overlap are put into lanes, which viewers draw below each other.
"""

import heapq
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from rl.system.disk import RecordingError

TIMELINE = "timeline.json"
CONTROLLER = "controller"
_END = b"\n]"
_LONGEST_WRITE = 1 << 24  # bytes at the file's end among which a whole event is looked for

_active: ContextVar["Timeline | None"] = ContextVar("timeline", default=None)
_show: ContextVar[Callable[[str, int, int], None] | None] = ContextVar("progress", default=None)
_gauges: ContextVar[dict[str, list[float]] | None] = ContextVar("gauges", default=None)


@dataclass(slots=True)
class _Process:
    number: int
    free: list[int] = field(default_factory=list[int])
    """Lanes that are free now; the lowest comes first."""
    num_lanes: int = 0

    def take(self) -> int:
        """A lane."""
        if self.free:
            return heapq.heappop(self.free)
        self.num_lanes += 1
        return self.num_lanes - 1


class Timeline:
    """Collects events in memory; `write` appends them to the file, which is whole JSON after each time."""

    def __init__(self, file: Path, max_calls: int = 100_000) -> None:
        """Continues the file of a run that is resumed. Nothing is written yet.

        After `max_calls`, which take 15 MB, only phases are recorded.
        """
        self.file = file
        self._max_calls = max_calls
        self._processes: dict[str, _Process] = {}
        self._events: list[dict[str, Any]] = []
        self._num_calls = 0
        self._guard = threading.Lock()

    def activate(self) -> None:
        """Makes `span` record here, in this context and in all tasks that are made in it."""
        _active.set(self)

    @contextmanager
    def record(self, process: str, name: str) -> Generator[None]:
        """Records how long the block takes."""
        is_call = process != CONTROLLER
        if is_call and self._num_calls >= self._max_calls:
            yield
            return
        self._num_calls += is_call
        begun, started = wall_time(), time.perf_counter_ns()
        with self._guard:
            row = self._process(process)
            lane = row.take()
        try:
            yield
        finally:
            lasted = time.perf_counter_ns() - started
            with self._guard:
                heapq.heappush(row.free, lane)
                self._events.append(
                    {"ph": "X", "name": name, "pid": row.number, "tid": lane, "ts": begun * 1e6, "dur": lasted / 1e3}
                )

    def count(self, process: str, values: Mapping[str, float]) -> None:
        """Records numbers of a process as they are now, which viewers draw as curves."""
        with self._guard:
            event = {"ph": "C", "name": "load", "pid": self._process(process).number, "ts": wall_time() * 1e6}
            self._events.append({**event, "args": dict(values)})

    def write(self) -> None:
        """Appends what was recorded since the last time. Raises `RecordingError`."""
        with self._guard:
            events, self._events = self._events, []
            names = {process.number: name for name, process in self._processes.items()}
        if not events:
            return
        # Behind the events that need them, so that a reader of the file's end finds the names of its processes.
        events += [
            {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": names[number]}}
            for number in sorted({event["pid"] for event in events})
        ]
        lines = ",\n".join(json.dumps(event) for event in events).encode()
        try:
            with self.file.open("rb+" if self.file.exists() else "wb+") as stream:
                end = _end_of_events(stream)
                stream.seek(end)
                stream.write((b",\n" if end else b"[\n") + lines + _END)
                stream.truncate()
        except OSError as error:
            raise RecordingError(self.file, error) from error

    def _process(self, name: str) -> _Process:
        """The process of this name."""
        if name not in self._processes:
            self._processes[name] = _Process(zlib.crc32(name.encode()) % 100_000)  # the same in a resumed run
        return self._processes[name]


def _end_of_events(stream: BinaryIO) -> int:
    """Where the last whole event ends; 0 without one. A killed process may have left a part of a line."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - len(_END)))
    if stream.read() == _END:
        return size - len(_END)
    start = max(0, size - _LONGEST_WRITE)
    stream.seek(start)
    return max(0, start + stream.read().rfind(b"},\n") + 1)


def wall_time() -> float:
    """Seconds since 1970. In one process it never goes back, also if the host's clock is set back meanwhile."""
    return _of_start() + time.clock_gettime(time.CLOCK_BOOTTIME)  # which counts the time that a host is suspended, too


@cache
def _of_start() -> float:
    """When this host was started, by its clock at the first call."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


@contextmanager
def span(process: str, name: str) -> Generator[None]:
    """Records how long the block takes, in the timeline of the run that this code belongs to, if any."""
    timeline = _active.get()
    if timeline is None:
        yield
    else:
        with timeline.record(process, name):
            yield


def gauge(process: str, values: Mapping[str, float]) -> None:
    """Adds numbers of a process to the timeline and to the step's metrics of the run that this code belongs to."""
    if (timeline := _active.get()) is not None and values:
        timeline.count(process, values)
    if (gauges := _gauges.get()) is not None:
        for name, value in values.items():
            gauges.setdefault(name, []).append(value)


def collect_gauges() -> Callable[[], dict[str, float]]:
    """Makes `gauge` collect, in this context and in all tasks that are made in it. Returns what takes the numbers out.

    Of several values since the last time, a name that ends in `_max` has the largest and any other their mean.
    """
    gauges: dict[str, list[float]] = {}
    _gauges.set(gauges)

    def take() -> dict[str, float]:
        taken = {name: max(v) if name.endswith("_max") else sum(v) / len(v) for name, v in gauges.items()}
        gauges.clear()
        return taken

    return take


def show_progress_with(show: Callable[[str, int, int], None]) -> None:
    """Makes `report_progress` call `show`, in this context and in all tasks that are made in it."""
    _show.set(show)


def report_progress(text: str, done: int, total: int) -> None:
    """Says that `done` of `total` parts of some work are done, for the user of the run that this code belongs to."""
    show = _show.get()
    if show is not None and total:
        show(text, done, total)
