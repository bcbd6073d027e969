"""Errors of processes, as opposed to the caller's mistakes, which are ValueErrors."""

from pathlib import Path


class MeshError(RuntimeError):
    """A process of a mesh died, hung or failed alone. All processes of the mesh have ended or are being killed.

    If one rank's exception was the cause, it is the error's `__cause__`. The mesh's last call may or may not have taken
    effect.
    """

    def __init__(
        self,
        mesh: str,
        reason: str,
        *,
        rank: int | None = None,
        verb: str | None = None,
        log_files: tuple[Path, ...] = (),
        details: str = "",
    ) -> None:
        """`mesh` is the name of the mesh ("trainer"); `details` are stacks and the last lines of logs."""
        where = f"; logs: {', '.join(map(str, log_files))}" if log_files else ""
        super().__init__(f"{mesh}: {reason}{where}" + (f"\n{details}" if details else ""))
        self.mesh = mesh
        self.reason = reason
        self.rank = rank
        """The rank that died, hung or failed; None if it is not known."""
        self.verb = verb
        """The call in which it happened; None outside of calls."""
        self.log_files = log_files
        self.details = details

    def again(self, log_files: tuple[Path, ...] = (), details: str = "") -> "MeshError":
        """The same error for another call that it ends, or with more details."""
        other = type(self)(
            self.mesh,
            self.reason,
            rank=self.rank,
            verb=self.verb,
            log_files=log_files or self.log_files,
            details=details or self.details,
        )
        other.__cause__ = self.__cause__
        return other


class DeadlineError(MeshError):
    """A process did not answer in time, or was stopped. It has been killed."""


class HostLostError(MeshError):
    """A host does not answer any more, or its worker has ended. The message names it.

    What ran there is not known to have ended; the host's agent sees to that.
    """


class HostsOverError(HostLostError):
    """All hosts of a run are gone, and none comes back before the run begins again: their job has ended."""


class ProcessDiedError(RuntimeError):
    """Says how a process died that a call went to. The mesh's calls raise `MeshError` for it."""


class ArgumentsError(ValueError):
    """An argument of a call cannot be sent to a process, or be read there, such as a loss whose module is not found.

    Nothing has been computed: the mesh's state is as it was.
    """


class PolicyLostError(ValueError):
    """A frozen version that only a dead generator had. Its successor found it no longer published."""


class RequestTimeoutError(RuntimeError):
    """A request took longer than `GeneratorConfig.request_timeout_s`. The generator is fine."""


class TrainingStoppedError(RuntimeError):
    """The run could not continue, so the loop saved a checkpoint and ended; the message says why and where it is."""
