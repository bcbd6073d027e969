"""How tests wait: for a state, for a process, and in an event loop whose clock takes no time. All waits have limits."""

import asyncio
import contextlib
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil

T = TypeVar("T")

LIMIT_S = 120.0
"""Generous, so that a busy machine fails no test: what is waited for takes a fraction of it."""


def wait_until(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S, every_s: float = 0.01) -> None:
    """Returns once `condition` holds. Fails with `what` was waited for after `limit_s`."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"waited {limit_s:g} s in vain for {what}"
        time.sleep(every_s)


async def until(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S, every_s: float = 0.01) -> None:
    """As `wait_until`, while other tasks run."""
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s
    while not condition():
        assert loop.time() < end, f"waited {limit_s:g} s in vain for {what}"
        await asyncio.sleep(every_s)


def children(named: str) -> list[psutil.Process]:
    """The children of this process that run and whose command has this word."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # also of a child that has ended
            found += [child] if named in " ".join(child.cmdline()) else []
    return found


def join(*workers: threading.Thread | BaseProcess) -> None:
    """Waits until threads or processes of multiprocessing have ended."""
    for worker in workers:
        worker.join(LIMIT_S)
        assert not worker.is_alive(), f"waited {LIMIT_S:g} s in vain for the end of {worker.name}"


def wait_for_end(process: subprocess.Popen[Any], what: str, limit_s: float = LIMIT_S) -> tuple[int, str, str]:
    """The status, the output and the errors of a process once it has ended.

    A process that does not end is killed, and the failure has what it printed and where its threads wait.
    """
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        threads = [
            [_read(task / name) for name in ("comm", "wchan")] for task in Path(f"/proc/{process.pid}/task").glob("*")
        ]
        process.kill()
        printed = process.communicate(timeout=LIMIT_S)
        said = (
            f"waited {limit_s:g} s in vain for the end of {what}; its threads wait in {threads}; it printed {printed}"
        )
        raise AssertionError(said) from None
    return process.returncode, _text(output), _text(errors)


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # the thread has ended
        return ""


def has_ended(process: psutil.Process | int) -> bool:
    """Whether a process is gone or a zombie. An orphan stays a zombie where the first process waits for no child."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def wait_for_ends(processes: Iterable[psutil.Process | int], what: str) -> None:
    """Returns once every process has ended, whether its parent has noticed or not."""
    left = list(processes)
    wait_until(lambda: all(has_ended(process) for process in left), f"the end of {what}")


def wait_for_line(pipe: IO[Any] | None, what: str, limit_s: float = LIMIT_S) -> str:
    """The next line that a process writes to a pipe. Reads byte by byte, so that the rest is left to others."""
    assert pipe is not None
    line, end, file = b"", time.monotonic() + limit_s, pipe.fileno()
    with selectors.DefaultSelector() as selector:
        selector.register(file, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            assert selector.select(max(0.0, end - time.monotonic())), (
                f"waited {limit_s:g} s in vain for {what}, after {line!r}"
            )
            byte = os.read(file, 1)
            assert byte, f"the output ended before {what}, after {line!r}"
            line += byte
    return line.decode().removesuffix("\n")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while tasks or threads work, and jumps to the next timer when none does.

    So a deadline of 20 s takes no time and cannot be missed because the machine is busy. It knows the threads that it
    started itself (`asyncio.to_thread`). It does not know other processes: what waits for one needs a real clock.
    """

    def __init__(self) -> None:
        """The clock begins at 0."""
        self.now = 0.0
        """Seconds. A thread that stands for slow work may add to it."""
        self.num_threads = 0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """The clock that timers and deadlines follow."""
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Counts the thread while it works."""

        def ended(_: object) -> None:
            self.num_threads -= 1

        self.num_threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(ended)
        return future


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if events := super().select(0):
            return events
        if timeout is None or self._loop.num_threads:
            events = super().select(LIMIT_S if timeout is None or timeout > 0 else 0)
            assert events or (timeout is not None and timeout <= 0), f"nothing has happened for {LIMIT_S:g} s"
            return events
        self._loop.now += max(timeout, 0.0)
        return []


def run_virtual(body: Coroutine[Any, Any, T], limit_s: float = 10_000.0) -> T:
    """Runs a coroutine in a `VirtualLoop`, for at most `limit_s` of its time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(asyncio.wait_for(body, limit_s))


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
