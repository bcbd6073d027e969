"""The suite's own run: it ends tasks of other threads and says what was left out; `make stress` counts failures."""

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.stress import conditions
from tests.suite import end_tasks
from tests.waiting import has_ended

Running = tuple[asyncio.AbstractEventLoop, threading.Thread]


@pytest.fixture
def running() -> Generator[Running]:
    """A loop that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="other", daemon=True)
    thread.start()
    yield loop, thread
    if loop.is_closed():
        return
    if thread.is_alive():
        _stop((loop, thread))
    while tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=0.1))
    loop.close()


def _begin(loop: asyncio.AbstractEventLoop, *, num_ignored: int = 0) -> threading.Event:
    """Begins a task that waits; the event says that it was cancelled. It waits again after so many cancellations."""
    begun, cancelled = threading.Event(), threading.Event()

    async def wait() -> None:
        begun.set()
        for _ in range(num_ignored):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            cancelled.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    asyncio.run_coroutine_threadsafe(wait(), loop)
    assert begun.wait(60)
    return cancelled


def _stop(running: Running) -> None:
    loop, thread = running
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)


def test_the_tasks_of_another_threads_loop_end(running: Running) -> None:
    cancelled = [_begin(running[0]) for _ in range(3)]
    end_tasks(*running)
    assert all(each.is_set() for each in cancelled)
    end_tasks(*running)  # there is none left


@pytest.mark.parametrize("closed", [False, True])
def test_a_loop_that_was_stopped_or_closed_is_not_waited_for(running: Running, closed: bool) -> None:
    cancelled = threading.Event() if closed else _begin(running[0])
    _stop(running)
    if closed:
        running[0].close()
    begin = time.monotonic()
    end_tasks(*running, limit_s=600)
    assert time.monotonic() - begin < 60
    assert not cancelled.is_set()


def test_a_loop_that_stops_meanwhile_is_not_waited_for(running: Running) -> None:
    loop, _ = running
    cancelled = _begin(loop, num_ignored=3)

    def stop() -> None:
        assert cancelled.wait(60)
        loop.call_soon_threadsafe(loop.stop)

    stopping = threading.Thread(target=stop)
    stopping.start()
    begin = time.monotonic()
    end_tasks(*running, limit_s=600)
    assert time.monotonic() - begin < 60
    stopping.join(60)


def test_without_a_loop_nothing_happens() -> None:
    end_tasks(None, None)


def test_a_task_that_ignores_a_cancellation_is_cancelled_again(running: Running) -> None:
    _begin(running[0], num_ignored=1)
    end_tasks(*running)
    assert not asyncio.all_tasks(running[0])


def test_a_task_that_does_not_end_is_named(running: Running) -> None:
    _begin(running[0], num_ignored=3)
    with pytest.raises(RuntimeError, match=r"thread 'other' did not end within 0\.2 s: .*_begin\.<locals>\.wait"):
        end_tasks(*running, limit_s=0.2)


def test_a_loop_that_does_not_answer_is_an_error(running: Running) -> None:
    over = threading.Event()
    running[0].call_soon_threadsafe(over.wait, 60)
    with pytest.raises(RuntimeError, match=r"loop of thread 'other' did not answer within 0\.4 s"):
        end_tasks(*running, limit_s=0.2)
    over.set()


_LEAVES_OUT = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("row", range(3))
def test_slow(row): ...

@pytest.mark.parametrize("row", range(2))
def test_skipped(row):
    pytest.skip("no such device; " + 20 * "one needs another machine ")

def test_passes(): ...
"""

_WITH_PLUGIN = """
from tests.suite import LeftOut

def pytest_configure(config):
    config.pluginmanager.register(LeftOut(strict={strict}))
"""

_SKIPS = """
import pytest

def test_of_a_gpu():
    pytest.skip("hardware: needs a GPU")
"""

_SKIPS_A_FILE = """
import pytest

pytest.importorskip("a_package_that_nobody_has")
"""


@pytest.mark.seconds
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_says_what_it_left_out(tmp_path: Path, workers: int) -> None:
    (tmp_path / "test_fake.py").write_text(_LEAVES_OUT)
    (tmp_path / "conftest.py").write_text(_WITH_PLUGIN.format(strict=False))
    command = [sys.executable, "-m", "pytest", "-cpyproject.toml", "-pno:cacheprovider", f"-n{workers}", str(tmp_path)]

    def said(*options: str) -> list[str]:
        done = subprocess.run(
            [*command, *options], env=_env(), capture_output=True, text=True, timeout=300, check=False
        )
        return [line for line in done.stdout.splitlines() if line.startswith(("left out: ", "skipped: "))]

    slow, skipped = said("-m", "not slow")
    assert slow == "left out: 3 slow tests, which `make test-slow` runs"
    assert skipped.startswith("skipped: 2: no such device; one needs another machine")
    assert len(skipped) < 80
    if not workers:
        assert said("-k", "passes", "-m", "not slow") == []
        assert said("-m", "slow") == []


@pytest.mark.seconds
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ((_SKIPS,), None),
        ((_SKIPS, _LEAVES_OUT), "no such device"),
        ((_SKIPS, _SKIPS_A_FILE), "a_package_that_nobody_has"),
    ],
)
def test_a_strict_run_fails_for_what_can_be_installed(
    tmp_path: Path, files: tuple[str, ...], reason: str | None, workers: int
) -> None:
    for number, text in enumerate(files):
        (tmp_path / f"test_fake_{number}.py").write_text(text)
    (tmp_path / "conftest.py").write_text(_WITH_PLUGIN.format(strict=True))
    command = [sys.executable, "-m", "pytest", "-cpyproject.toml", "-pno:cacheprovider", f"-n{workers}", str(tmp_path)]
    done = subprocess.run(command, env=_env(), capture_output=True, text=True, timeout=300, check=False)
    errors = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    if reason is None:
        assert (done.returncode, errors) == (0, [])
    else:
        assert done.returncode == 1
        assert reason in errors[0]
        assert "GPU" not in errors[0]


def _env() -> dict[str, str]:
    """Without what a run of this test may set itself: it may be one under pytest-xdist, and under a cap."""
    ours = ("PYTEST_", "ONEDNN_", "ATEN_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


_EVERY_SECOND = """
import os
from pathlib import Path
import pytest

@pytest.mark.e2e
def test_of_every_second_time():
    runs = Path(__file__).with_name("runs")
    with runs.open("a") as file:
        print(os.environ.get("ONEDNN_MAX_CPU_ISA"), file=file)
    assert len(runs.read_text().splitlines()) % 2, "it is the second time\\nwith more lines"

@pytest.mark.slow
@pytest.mark.e2e
def test_that_is_left_out():
    raise AssertionError

def test_that_starts_no_process():
    raise AssertionError
"""

_HANGS = """
import os, subprocess, sys, time
from pathlib import Path
import pytest

@pytest.mark.e2e
def test_that_hangs():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    part = Path(__file__).with_name("part")
    part.write_text(f"{os.getpid()} {child.pid}")
    part.rename(part.with_name("pids"))
    time.sleep(600)
"""


def _stress(folder: Path, tests: str, rounds: int) -> subprocess.Popen[str]:
    (folder / "test_fake.py").write_text(tests)
    command = [sys.executable, "-m", "tests.stress", str(rounds), f"--folder={folder / 'new'}"]
    command += ["-n0", "-pno:cacheprovider", str(folder)]
    return subprocess.Popen(command, env=_env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_stress_says_how_often_a_test_failed(tmp_path: Path) -> None:
    process = _stress(tmp_path, _EVERY_SECOND, 4)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1, output
    lines, (folder,) = output.splitlines(), tmp_path.glob("new/ownloop-stress-*")
    runs = (tmp_path / "runs").read_text().split()
    assert [line.rpartition(" failed")[0] for line in lines[1:5]] == [
        "round 1, 2 busy loops: 0",
        f"round 2, {runs[1].replace('None', 'nothing else')}: 1",
        "round 3, 2 busy loops: 0",
        f"round 4, {runs[3].replace('None', 'nothing else')}: 1",
    ]
    assert runs[0] == runs[2] == "None"
    assert "test_of_every_second_time" in lines[5]
    assert lines[5].startswith("   1 of 1    ")
    assert lines[6].strip() == "AssertionError: it is the second time"
    assert lines[-1] == f"2 failures in 4 rounds; logs and results: {folder}"
    assert {f"{index}.{kind}" for index in range(1, 5) for kind in ("log", "xml")} <= {
        path.name for path in folder.iterdir()
    }


@pytest.mark.slow
def test_stress_without_failures_ends_well(tmp_path: Path) -> None:
    for tests, status, says in (
        ("def test_it(): pass", 1, "pytest ended with 5"),
        (_EVERY_SECOND, 0, "0 failures in 1"),
    ):
        process = _stress(tmp_path, tests, 1)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == status, output
        assert says in output


@pytest.mark.slow
def test_ctrl_c_ends_what_stress_started(tmp_path: Path) -> None:
    process = _stress(tmp_path, _HANGS, 2)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "pids").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        started = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(started) == 3  # pytest, and two busy loops
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, output
    pids = {*started, *(tmp_path / "pids").read_text().split()}
    assert [pid for pid in pids if not has_ended(int(pid))] == []


def test_stress_takes_turns_with_the_kinds_of_a_cpu() -> None:
    first = list(itertools.islice(conditions({"avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl"}), 6))
    names = ["2 busy loops", "AVX2", "2 busy loops", "AVX512_CORE", "2 busy loops", "AVX2"]
    assert [each.name for each in first] == names
    assert first[1].env == {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    assert first[3].env == {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    assert [each.name for each in itertools.islice(conditions(()), 2)] == ["2 busy loops", "nothing else"]
