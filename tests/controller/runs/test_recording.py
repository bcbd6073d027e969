"""The thread that writes rollouts: order, bounds, and a disk that is full."""

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.runs.folder import RunFolder
from controller.runs.recording import MAX_WAITING, BackgroundWriter, write_rollouts
from rl.rollouts.columns import read_groups
from rl.system.disk import RecordingError
from rl.types import Group, Rollout
from tests.rl.fakes import completion, single_turn
from tests.rl.recordings import disk_of
from tests.waiting import LIMIT_S


def _group(text: str = "ab", name: str = "p") -> Group:
    return Group(problem_id=name, prompt="q", rollouts=(single_turn((1, 2), completion(text), reward=0.5),))


def big_group() -> Group:
    """A group that takes some 50 KB on disk."""
    return _group("".join(map(chr, range(100, 30_000))))


def _names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_every_step_and_evaluation_is_a_whole_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", {})
    folder.log_rollouts(0, [_group("eval")], split="eval")
    folder.log_rollouts(1, [_group("one"), _group("two")])
    folder.log_rollouts(1, [_group("again")])
    folder.log_rollouts(2, [Group(problem_id="p", prompt="q", rollouts=(), failures=("hung",))])
    folder.flush()
    assert _names(folder.rollouts) == ["eval-00000.parquet", "step-00001-2.parquet", "step-00001.parquet"]
    assert read_groups(folder.rollouts / "step-00001.parquet") == [_group("one"), _group("two")]


def test_a_full_disk_ends_the_run_and_leaves_no_half_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", {})
    folder.log_rollouts(1, [_group()])
    folder.flush()
    with disk_of(20_000):
        folder.log_rollouts(2, [big_group()])
        folder.log_rollouts(3, [_group()])  # would fit, but then step 2 would be missing in between
        with pytest.raises(RecordingError, match=r"rollouts/step-00002\.parquet cannot be written: File too large"):
            folder.flush()
    for call in (lambda: folder.log_metrics({"step": 4.0}), lambda: folder.log_rollouts(4, [_group()])):
        with pytest.raises(RecordingError, match=r"step-00002\.parquet cannot be written"):
            call()
    for waits in (folder.room, folder.sync):
        with pytest.raises(RecordingError, match=r"step-00002\.parquet cannot be written"):
            asyncio.run(waits())
    assert _names(folder.rollouts) == ["step-00001.parquet"]
    assert folder.metrics() == []


def test_a_line_that_does_not_fit_leaves_the_lines_before_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", {})
    folder.log_metrics({"step": 1.0})
    before = folder.metrics_file.read_bytes()
    with (
        disk_of(len(before) + 10),
        pytest.raises(RecordingError, match=r"metrics\.jsonl cannot be written: File too large"),
    ):
        folder.log_metrics({"step": 2.0})
    assert folder.metrics_file.read_bytes() == before
    folder.log_metrics({"step": 2.0})
    assert [row["step"] for row in folder.metrics()] == [1, 2]


SMALL_DISK = """
import asyncio, sys
from pathlib import Path
from rl.rollouts.columns import read_groups
from controller.runs.folder import RunFolder
from rl.system.disk import RecordingError, write_json
from tests.controller.runs.test_recording import big_group
folder, step = RunFolder(Path(sys.argv[1]) / "a", {}, min_free_bytes=0), 0
try:
    while True:
        step += 1
        folder.log_metrics({"step": float(step)})
        folder.log_rollouts(step, [big_group()])
        folder.flush()
except RecordingError as error:
    print(error)
assert step > 2
assert [file.name for file in folder.rollouts.iterdir() if file.name.startswith(".")] == []
assert all(read_groups(file) == [big_group()] for file in folder.rollouts.iterdir())
assert len([*folder.rollouts.iterdir()]) == step - 1
try:
    write_json(folder.path / "loop.json", {"values": "x" * 1_000_000})
except RecordingError as error:
    print(error)
assert not (folder.path / "loop.json").exists()
"""


def test_a_disk_without_space_is_said_and_holds_whole_files_only(tmp_path: Path) -> None:
    # A file system of 1 MB in a mount namespace of its own: the error is the kernel's.
    script = 'mount -t tmpfs -o size=1m tmpfs "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    done = subprocess.run(
        [*command, str(tmp_path), sys.executable, SMALL_DISK],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"this machine has no user namespaces: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert re.fullmatch(r".*/a/(rollouts/step-\d{5}\.parquet|metrics\.jsonl) cannot be written: No space left.*", first)
    assert second == f"{tmp_path}/a/loop.json cannot be written: No space left on device"


def test_a_disk_that_is_behind_only_makes_the_loop_wait() -> None:
    writer, disk, done = BackgroundWriter(), threading.Event(), list[int]()

    def work(number: int) -> None:
        disk.wait(LIMIT_S)
        done.append(number)

    async def loop() -> int:
        for number in range(MAX_WAITING):
            writer.submit(lambda number=number: work(number))
            await asyncio.wait_for(writer.room(), LIMIT_S)  # does not wait yet
        writer.submit(lambda: work(MAX_WAITING))
        waiting = asyncio.create_task(writer.room())
        for _ in range(20):  # the event loop goes on
            await asyncio.sleep(0)
        assert not waiting.done()
        assert done == []
        disk.set()
        await asyncio.wait_for(waiting, LIMIT_S)
        left = MAX_WAITING + 1 - len(done)
        await writer.flush()
        return left

    assert asyncio.run(loop()) <= MAX_WAITING
    assert done == list(range(MAX_WAITING + 1))


def test_a_loop_that_never_waits_is_made_to() -> None:
    writer, waiting, most = BackgroundWriter(), threading.Semaphore(0), 0
    finished = 0

    def work() -> None:
        nonlocal finished
        waiting.acquire(timeout=0.01)
        finished += 1

    for submitted in range(1, 31):
        writer.submit(work)
        most = max(most, submitted - finished)
    writer.finish()
    assert finished == 30
    assert most <= 10


async def test_a_cancelled_loop_loses_no_rollouts(tmp_path: Path) -> None:
    writer, disk, file = BackgroundWriter(), threading.Event(), tmp_path / "a.parquet"

    def wait() -> None:
        disk.wait(LIMIT_S)

    writer.submit(wait)
    writer.submit(lambda: write_rollouts(file, [_group()]))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(writer.flush(), 0.05)
    disk.set()
    writer.finish()
    assert read_groups(file) == [_group()]


def test_a_mistake_in_the_work_keeps_its_type() -> None:
    writer = BackgroundWriter()

    def work() -> None:
        raise KeyError("my own mistake")

    writer.submit(work)
    with pytest.raises(KeyError, match="my own mistake"):
        writer.finish()


def test_what_was_handed_over_is_written_before_the_process_ends(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from controller.runs.folder import RunFolder\n"
        "from tests.controller.runs.test_recording import _group\n"
        "folder = RunFolder(Path(sys.argv[1]), {})\n"
        "folder.in_background(lambda: time.sleep(0.2))\n"
        "folder.log_rollouts(1, [_group()])\n"
        "raise SystemExit(3)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], check=False, timeout=LIMIT_S)
    assert done.returncode == 3
    assert read_groups(tmp_path / "a" / "rollouts" / "step-00001.parquet") == [_group()]


def test_handing_over_does_not_convert_on_the_loops_thread(tmp_path: Path) -> None:
    folder, disk, read_by = RunFolder(tmp_path / "a", {}), threading.Event(), set[int]()

    class Watched(tuple[Rollout, ...]):
        """Rollouts that note which threads read them."""

        def __iter__(self) -> Iterator[Rollout]:
            read_by.add(threading.get_ident())
            return super().__iter__()

    rollout = single_turn((1,), completion("ab"), reward=0.0)

    def wait() -> None:
        disk.wait(LIMIT_S)

    folder.in_background(wait)
    folder.log_rollouts(1, [Group(problem_id="p", prompt="", rollouts=Watched((rollout,) * 8))])
    assert read_by == set()
    disk.set()
    folder.flush()
    assert len(read_by) == 1
    assert threading.get_ident() not in read_by
    assert read_groups(folder.rollouts / "step-00001.parquet") == [
        Group(problem_id="p", prompt="", rollouts=(rollout,) * 8)
    ]
