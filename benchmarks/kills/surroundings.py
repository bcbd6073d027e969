"""Runs on a disk that fills up or becomes read-only, with little shared memory, or with a clock that jumps.

Disk and shared memory are file systems in memory, in a mount namespace of the run's own, so that nothing else on the
machine notices. The namespace lives as long as a process that sleeps; other commands enter it with `nsenter`.
"""

import contextlib
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

from benchmarks.kills.cell import RUN_LIMIT_S, Cell, Outcome, finish, wait_until
from benchmarks.kills.fault import STRIKE_STEP, Fault
from controller.runs.folder import complete_checkpoints, read_metrics

Surrounding = Literal["no space left", "read-only run folder", "64 MB of shared memory", "a clock that jumps"]
SURROUNDINGS: tuple[Surrounding, ...] = get_args(Surrounding)
_DISK_MB = 400  # a run asks for 256 MiB before it starts
LAYOUT = Fault("controller", "exception", "generate", "grpo")
"""The loop and the layout of these runs; they are not told to strike a fault."""


def endure(surrounding: Surrounding, folder: Path, model: Path, whole: Path, layout: Fault = LAYOUT) -> Outcome:
    """Runs a loop in these surroundings, resumes it if it ends, and compares it with a `whole` run of its layout."""
    outcome = Outcome(f"grpo{', with an adapter' if layout.lora else ''}: {surrounding}")
    if surrounding == "a clock that jumps":
        cell = Cell(folder, model, layout)
        return finish(cell, outcome, cell.start(extra={"KILLS_CLOCK": "1"}), time.monotonic(), whole)
    (folder / "runs").mkdir(parents=True)
    with namespace() as holder:
        if holder is None:
            outcome.what = "not tried: this user may not create a mount namespace here"
            return outcome
        small_memory = surrounding == "64 MB of shared memory"
        place, megabytes = (Path("/dev/shm"), 64) if small_memory else (folder / "runs", _DISK_MB)
        _inside(holder, "mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place))
        prefix = [*_enter(holder), "sh", "-c", f'cd "{folder}" && exec "$@"', "sh"]
        cell = Cell(folder, model, layout, prefix, root=Path(f"/proc/{holder}/root"))
        process = cell.start()
        mend: Callable[[], None] | None = None
        if not small_memory:
            _wait_for_step(cell, process)
            mend = _spoil(surrounding, holder, place)
        return finish(cell, outcome, process, time.monotonic(), whole, before_resume=mend)


@contextmanager
def namespace() -> Generator[int | None]:
    """The process of a new mount namespace in which this user may mount; None where the kernel does not allow it."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", "echo ready; exec sleep 100000"]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert holder.stdout is not None
    try:
        yield holder.pid if holder.stdout.readline() == "ready\n" else None
    finally:
        holder.kill()
        holder.communicate()


def _spoil(surrounding: Surrounding, holder: int, disk: Path) -> Callable[[], None]:
    """Makes the disk full or read-only. Returns what undoes it."""
    if surrounding == "read-only run folder":
        # "force" is not to be had: the remount waits until no file is open for writing, which a log always is.
        _inside(holder, "mount", "--bind", str(disk), str(disk))
        _inside(holder, "mount", "-o", "remount,bind,ro", str(disk))
        return lambda: _inside(holder, "umount", str(disk))
    filler = Path(f"/proc/{holder}/root") / disk.relative_to("/") / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
        while True:
            stream.write(b"\0" * 2**16)
    return filler.unlink


def _wait_for_step(cell: Cell, process: "subprocess.Popen[bytes]") -> None:
    """Waits until the step before the one in which faults strike is recorded, and a checkpoint is complete."""

    def ready() -> bool:
        rows = read_metrics(cell.run / "metrics.jsonl")
        return any(row["step"] >= STRIKE_STEP - 1 for row in rows) and bool(complete_checkpoints(checkpoints))

    checkpoints = cell.run / "checkpoints"
    wait_until(lambda: process.poll() is not None or ready(), RUN_LIMIT_S, every_s=0.02)


def _enter(holder: int) -> list[str]:
    """What begins a command that runs in the namespace of a process."""
    return ["nsenter", "--target", str(holder), "--user", "--mount", "--preserve-credentials"]


def _inside(holder: int, *command: str) -> None:
    subprocess.run([*_enter(holder), *command], check=True)
