"""Errors of processes, as opposed to the caller's mistakes, which are ValueErrors."""

from pathlib import Path


class MeshError(RuntimeError):
    """A process of a mesh died or stopped answering. Its last call may or may not have taken effect."""

    def __init__(self, mesh: str, reason: str, log_files: tuple[Path, ...] = (), log_tail: str = "") -> None:
        """`mesh` is the name of the mesh ("trainer"); `log_tail` holds the last lines of its logs."""
        where = f"; logs: {', '.join(map(str, log_files))}" if log_files else ""
        tail = f"\n--- last lines of its log ---\n{log_tail}" if log_tail else ""
        super().__init__(f"{mesh}: {reason}{where}{tail}")
        self.mesh = mesh
        self.reason = reason


class DeadlineError(MeshError):
    """A process did not answer within the time limit. It may still be running the call."""


class TrainingStoppedError(RuntimeError):
    """The run could not go on, so the loop saved a checkpoint and ended; the message says why and where it is."""
