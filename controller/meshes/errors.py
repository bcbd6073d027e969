"""What a controller script catches when a process, not its caller, is at fault."""

from pathlib import Path


class MeshError(RuntimeError):
    """A process of a mesh died or stopped answering. What it was asked to do may or may not have happened."""

    def __init__(self, mesh: str, reason: str, log_files: tuple[Path, ...] = (), log_tail: str = "") -> None:
        """`mesh` names the mesh ("trainer"), `log_tail` holds the last lines its processes wrote."""
        where = f"; logs: {', '.join(map(str, log_files))}" if log_files else ""
        tail = f"\n--- last lines of its log ---\n{log_tail}" if log_tail else ""
        super().__init__(f"{mesh}: {reason}{where}{tail}")
        self.mesh = mesh
        self.reason = reason


class DeadlineError(MeshError):
    """A process did not answer within the time it was given. It may still be running the call."""


class TrainingStoppedError(RuntimeError):
    """The loop ended a run that could not go on, after saving what it had; the message says what and where."""
