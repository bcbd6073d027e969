"""Tells whether an answer is mathematically the right one, with math-verify: https://github.com/huggingface/Math-Verify.

Each comparison runs in one of a few processes that are kept for it, with a limit of CPU time: on a busy machine a right
answer stays right. math-verify's own limits are signals, which only work in a main thread and cannot stop one long
operation on large numbers; a process can be killed.
"""

import functools
import os
import queue
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil

_STARTUP_LIMIT_S = 60.0  # importing SymPy takes a second, and much longer on a busy disk
_MAX_PROCESSES = 16
_WAITING_FACTOR = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What came of comparing a completion with the right answer."""

    found: bool = False
    """Whether the completion holds an answer at all."""
    right: bool = False
    timed_out: bool = False
    """Whether the comparison took too long; the answer then counts as not right."""


class MathComparer:
    """Compares answers in several processes, which start when they are first needed and end with this process."""

    def __init__(self, num_processes: int, waiting_factor: float = _WAITING_FACTOR) -> None:
        """At most `num_processes` comparisons run at a time; further calls wait.

        A process that gets no core may take `waiting_factor` times its limit.
        """
        self._waiting_factor = waiting_factor
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(num_processes):
            self._idle.put(None)

    def compare(self, answer: str, completion: str, *, boxed: bool, time_limit_s: float) -> Comparison:
        """Looks for an answer in the completion and compares it. Any thread may call it.

        If `boxed`, only the last `\\boxed{...}` counts; otherwise math-verify finds the answer in the text.
        `time_limit_s` is in seconds of CPU time. Raises ValueError if math-verify is not installed.
        """
        process = self._idle.get()
        try:
            if process is None or process.has_ended():  # killed while it was idle, which is not this answer's fault
                process = _Process(self._waiting_factor)
            found = process.ask((answer, completion, boxed, time_limit_s), time_limit_s)
            if found is None:
                process.kill()
                process = None
                return Comparison(timed_out=True)
            return Comparison(found=found[0], right=found[1])
        finally:
            self._idle.put(process)


@functools.cache
def math_comparer() -> MathComparer:
    """The comparer that all environments of this process share."""
    return MathComparer(min(_MAX_PROCESSES, max(2, (os.cpu_count() or 2) // 2)))


class _Process:
    """A running `rl.envs.math_process`."""

    def __init__(self, waiting_factor: float) -> None:
        self._waiting_factor = waiting_factor
        ours, theirs = Pipe()
        script = Path(__file__).with_name("math_process.py")
        # -P: the script's own folder must not be searched for modules.
        command = [sys.executable, "-P", str(script), str(theirs.fileno())]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()
        self._pipe: Any = ours
        failure = self._answer() if self._pipe.poll(_STARTUP_LIMIT_S) else None
        if failure != "":
            self.kill()
            raise ValueError(
                f"answers cannot be compared ({failure or 'the process did not start'}); pip install math-verify"
            )

    def ask(self, request: tuple[str, str, bool, float], time_limit_s: float) -> tuple[bool, bool] | None:
        """(found, right), or None if the process did not answer in time or died."""
        try:
            self._pipe.send(request)
        except OSError:
            return None
        return self._answer() if self._answers_within(time_limit_s) else None

    def _answers_within(self, time_limit_s: float) -> bool:
        """Waits for an answer, or for the end of the process, until it has computed for `time_limit_s`."""
        begun, deadline = self._cpu_time_s(), time.monotonic() + self._waiting_factor * time_limit_s
        left = time_limit_s
        while left > 0 and time.monotonic() < deadline:
            if self._pipe.poll(max(left, 0.01)):
                return True
            left = begun + time_limit_s - self._cpu_time_s()
        return False

    def _cpu_time_s(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def _answer(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            return None

    def has_ended(self) -> bool:
        """Whether it does not run any more."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()
