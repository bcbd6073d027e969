"""The state of a run, from its folder alone."""

from pathlib import Path

from controller.runs.folder import CONFIG_FILE, FINISHED_FILE, complete_checkpoints
from rl.system.files import read_json

FINISHED = "finished"
"""The state of a run that has come to its end."""


def state_of(run: Path) -> str:
    """ "running"; "finished"; or "stopped", and whether there is a checkpoint to go on from.

    A run that is resumed with more steps is not finished before it has done them.
    """
    if is_running(run):
        return "running"
    if is_finished(run):
        return FINISHED
    complete = complete_checkpoints(run / "checkpoints")
    return f"stopped, saved at {int(complete[-1].name.rpartition('-')[2])}" if complete else "stopped, nothing saved"


def is_finished(run: Path) -> bool:
    """Whether the run came to the end of the steps that its configuration asks for."""
    if not (run / FINISHED_FILE).is_file():
        return False
    num_steps = read_json(run / CONFIG_FILE).get("num_steps")
    return read_json(run / FINISHED_FILE).get("num_steps") == num_steps


def is_running(run: Path) -> bool:
    """Whether a process of this host holds the run's lock. Does not touch the lock, so that no run is refused it."""
    try:
        status = (run / ".lock").stat()
        locks = Path("/proc/locks").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(
        line.split()[1] == "FLOCK" and line.split()[5].rpartition(":")[2] == str(status.st_ino)
        for line in locks.splitlines()
        if "->" not in line  # one that waits
    )


def check_ended(run: Path) -> None:
    """Raises ValueError if a process of this host holds the run's folder."""
    if is_running(run):
        raise ValueError(f"{run} is running; wait for its end, or choose another --name")


def set_aside(run: Path) -> None:
    """Renames the folder of a run that cannot be resumed, so that its name is free. Does nothing if there is none.

    Raises ValueError if the run has not ended.
    """
    check_ended(run)
    if run.is_dir():
        number = next(n for n in range(1, 1000) if not run.with_name(f"{run.name}.stopped-{n}").exists())
        run.rename(run.with_name(f"{run.name}.stopped-{number}"))
