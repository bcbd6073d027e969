"""What `conftest.py` does at the end: it ends tasks of other threads, and says which tests did not run."""

import asyncio
import concurrent.futures
import threading
import time
from collections import Counter
from collections.abc import Sequence
from textwrap import shorten
from typing import Any

import pytest

_LOOK_S = 0.1


HARDWARE = "hardware: "
"""How the reason of a skipped test begins that other hardware would run. Packages and programs can be installed."""


class LeftOut:
    """A plugin of pytest that counts the slow tests that are left out, and prints them with those that are skipped.

    If it is strict, a run fails in which a test is skipped for another reason than hardware. Under pytest-xdist only
    workers find tests, and each finds all of them: the first one's number is printed.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self.num_slow = 0
        """Each row of a parametrized test counts, unless all tests of its file are slow."""

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Counts what `-m` has left out; what `-k` leaves out was not asked for."""
        expression = str(items[0].config.getoption("markexpr")) if items else ""
        if "not slow" in expression and not items[0].config.getoption("keyword"):
            self.num_slow += sum(item.get_closest_marker("slow") is not None for item in items)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A worker gives its number to the controller. A strict run fails if a test is skipped that must not be."""
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["num_slow"] = self.num_slow
        elif self._strict and session.exitstatus == 0 and any(map(_must_run, _reasons(_reporter(session.config)))):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)  # with -p no:xdist there are no workers
    def pytest_testnodedown(self, node: Any) -> None:
        """The controller takes a worker's number."""
        self.num_slow = getattr(node, "workeroutput", {}).get("num_slow", self.num_slow)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints up to two lines."""
        if self.num_slow:
            terminalreporter.write_line(f"left out: {self.num_slow} slow tests, which `make test-slow` runs")
        if reasons := _reasons(terminalreporter):
            listed = "; ".join(f"{number}: {shorten(reason, 56)}" for reason, number in reasons.most_common())
            terminalreporter.write_line(f"skipped: {listed}")
        if self._strict and (wrong := sorted(filter(_must_run, reasons))):
            terminalreporter.write_line(f"error: skipped for other reasons than hardware: {'; '.join(wrong)}")


def _reporter(config: pytest.Config) -> pytest.TerminalReporter:
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    return reporter


def _reasons(reporter: pytest.TerminalReporter) -> Counter[str]:
    """Why tests and whole files were skipped."""
    skips: list[Any] = reporter.stats.get("skipped", [])
    return Counter(str(skip.longrepr[-1]).removeprefix("Skipped: ") for skip in skips if skip.longrepr)


def _must_run(reason: str) -> bool:
    return not reason.startswith(HARDWARE)


LEFT_OUT = pytest.StashKey[LeftOut]()


def end_tasks(loop: asyncio.AbstractEventLoop | None, thread: threading.Thread | None, limit_s: float = 60.0) -> None:
    """Cancels the tasks of a loop that runs in `thread`, and waits until they have ended.

    A loop that is stopped or closed, or whose thread has ended, executes no task, so there is nothing to wait for. This
    holds for a loop that stops meanwhile, too. Raises RuntimeError, which names the tasks, if some still run after
    `limit_s`, and if the loop does not answer.
    """
    if loop is None or thread is None or not _runs(loop, thread):
        return
    cancelling = _cancel_tasks(limit_s)
    try:
        answer = asyncio.run_coroutine_threadsafe(cancelling, loop)
    except RuntimeError:  # the loop was closed a moment ago
        cancelling.close()
        return
    deadline = time.monotonic() + 2 * limit_s
    while not concurrent.futures.wait([answer], timeout=_LOOK_S).done:
        if not _runs(loop, thread):
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"the event loop of thread {thread.name!r} did not answer within {2 * limit_s:g} s")
    if left := answer.result():
        raise RuntimeError(f"tasks of thread {thread.name!r} did not end within {limit_s:g} s: {', '.join(left)}")


def _runs(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> bool:
    return thread.is_alive() and loop.is_running()


async def _cancel_tasks(limit_s: float) -> list[str]:
    """Names those that still run after `limit_s`."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s
    while left and loop.time() < end:
        for task in left:  # again: a task may take a cancellation for an error of its request, and try once more
            task.cancel()
        left = (await asyncio.wait(left, timeout=min(1.0, limit_s)))[1]
    return sorted(str(task.get_coro()) for task in left)
