"""Whoever is killed, whenever: nobody reads a mixture of two versions, hangs, or leaves memory behind."""

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import inconsistent_read_processes
from tests.waiting import LIMIT_S, join, wait_until
from trainer.engines.contract.plain_ranks import preloaded_forkserver

pytestmark = pytest.mark.e2e

NUM_SCHEDULES = 200


@pytest.mark.slow
def test_every_version_read_is_whole_around_one_kill(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    totals = _run(preloaded_forkserver(), tmp_path, random.Random(NUM_SCHEDULES))
    assert totals["inconsistent"] == 0
    assert totals["whole"] > 0 < totals["published"]
    wait_until(lambda: _left_behind(before) == set(), "shared memory to be freed")


@pytest.mark.slow
def test_every_version_read_is_whole_under_random_kills(tmp_path: Path) -> None:
    before, totals = set(Path("/dev/shm").iterdir()), Counter[str]()
    for schedule in range(NUM_SCHEDULES):
        folder = tmp_path / str(schedule)
        folder.mkdir()
        totals += _run(preloaded_forkserver(), folder, random.Random(schedule))
    assert totals["inconsistent"] == 0
    # So many show that the kills fell among pushes and pulls.
    assert totals["whole"] > 3 * NUM_SCHEDULES
    assert totals["published"] > 3 * NUM_SCHEDULES
    wait_until(lambda: _left_behind(before) == set(), "shared memory to be freed")
    print(dict(totals))


def _run(context: Any, folder: Path, choose: random.Random) -> "Counter[str]":
    """Kills one process at a random moment of pushes and pulls, and looks at what the others then do."""
    processes: dict[str, BaseProcess] = {
        "store": context.Process(target=inconsistent_read_processes.serve_store, args=(str(folder / "store"),)),
        "trainer0": context.Process(target=inconsistent_read_processes.publish, args=(0, str(folder))),
        "trainer1": context.Process(target=inconsistent_read_processes.publish, args=(1, str(folder))),
        "generator": context.Process(
            target=inconsistent_read_processes.read, args=(str(folder), choose.randrange(1 << 30))
        ),
    }
    try:
        for process in processes.values():
            process.start()
        victim = choose.choice(list(processes))
        if choose.random() < 0.9:  # else during the start
            most = choose.randrange(12)  # a number and not a time: how fast the host is does not count
            wait_until(lambda: _num_done(folder) > most, "versions to be pushed and read")
        elif victim.startswith("trainer"):  # gloo waits for ever for a peer that dies while they connect
            wait_until(lambda: all(_report(folder, f"trainer{rank}") for rank in range(2)), "the ranks to be connected")
        time.sleep(choose.uniform(0, 0.05))
        _kill(processes[victim])
        if victim.startswith("trainer"):
            survivor = "trainer1" if victim == "trainer0" else "trainer0"
            processes[survivor].join(LIMIT_S)
            assert processes[survivor].exitcode is not None, f"{survivor} hangs after {victim} was killed"
            _still(folder, processes["generator"], "generator")
        elif victim == "generator":
            for name in ("trainer0", "trainer1"):
                _pushes_on(folder, processes[name], name)
                assert processes[name].is_alive()
        _kill(processes["store"])
        processes["generator"].join(LIMIT_S)
        assert processes["generator"].exitcode is not None, f"generator hangs after the store and {victim} were killed"
        for name in ("trainer0", "trainer1"):
            _pushes_on(folder, processes[name], name)
        for name in processes.keys() - {victim, "store"}:
            error = _report(folder, name).get("error")
            own = (None, "WeightsError", "PublisherGoneError")
            assert error in (*own, "RuntimeError", "DistBackendError", "DistNetworkError"), name
        reports = [_report(folder, name) for name in processes]
        return Counter(
            {key: sum(r.get(key, 0) for r in reports) for key in ("whole", "refused", "inconsistent", "published")}
        )
    finally:
        for process in processes.values():
            _kill(process)


def _left_behind(before: set[Path]) -> set[Path]:
    """New files of shared memory that no living process has mapped."""
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it may have ended by now
            mapped += maps.read_text(errors="replace")
    return {path for path in set(Path("/dev/shm").iterdir()) - before if str(path) not in mapped}


def _still(folder: Path, process: BaseProcess, name: str) -> None:
    """The process carries on, or has ended with an error of its own."""
    assert process.is_alive() or _report(folder, name)


def _pushes_on(folder: Path, process: BaseProcess, name: str) -> None:
    """The process goes on without a store, which it needs for its first pushes only, or has ended or ends now."""
    published = _report(folder, name).get("published", 0)
    wait_until(
        lambda: not process.is_alive() or _report(folder, name).get("published", 0) > published,
        f"{name} to push another version",
    )


def _kill(process: BaseProcess) -> None:
    if process.pid is not None and process.is_alive():
        with contextlib.suppress(ProcessLookupError):  # it has just ended of itself
            os.kill(process.pid, signal.SIGKILL)
        join(process)


def _num_done(folder: Path) -> int:
    """How many versions were certainly pushed, and how many read: the lower number."""
    return min(_report(folder, "trainer0").get("published", 0), _report(folder, "generator").get("whole", 0))


def _report(folder: Path, name: str) -> dict[str, Any]:
    try:
        return json.loads((folder / f"{name}.json").read_text())
    except FileNotFoundError:
        return {}
