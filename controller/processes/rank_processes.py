"""The operating-system processes of one mesh: which are gone or stopped, where their Python code is, how they end."""

import asyncio
import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

_STACK_SIGNAL = signal.SIGUSR2
_STACK_WAIT_S = 3.0  # for a process that is woken only to say where it is; on a loaded host it takes a moment
_LOG_TAIL_LINES = 20
_STACK_LINES = 60  # of each rank; the whole stack is in its log


def answer_stack_signal() -> None:
    """Makes this process write the Python stacks of its threads to its log whenever it is asked for them.

    The handler is C code that needs neither the interpreter lock nor rights to trace a process, so it works in a
    process that hangs in native code or in a loop, for any user, and inside containers.
    """
    faulthandler.register(_STACK_SIGNAL, file=2, all_threads=True)


class _Launches:
    by: int | None = None
    """The process that has launched meshes. Its threads, on which Monarch's answers come, do not outlive a fork."""


def in_fork() -> bool:
    """Whether this process is a fork of one that has launched meshes."""
    return _Launches.by not in (None, os.getpid())


def check_no_fork(*, launches: bool = False) -> None:
    """Raises ValueError in such a fork, where every call would hang. `launches` says that this process launches one."""
    if launches:
        _Launches.by = _Launches.by or os.getpid()
    if in_fork():
        raise ValueError(
            f"this process ({os.getpid()}) is a fork of process {_Launches.by}, which had launched processes by then; "
            "neither they nor new ones answer here. Launch in that process, or start this one anew, as by "
            'multiprocessing.get_context("spawn")'
        )


class RankProcesses:
    """The processes of one mesh in the order of their ranks, on this host. All are children of one process."""

    def __init__(self, pids: Sequence[int], log_files: tuple[Path, ...], parent: int | None = None) -> None:
        """`log_files` are what each rank's output goes to. `parent` is the id of their parent, by default this one."""
        self.pids = tuple(pids)
        self.log_files = log_files
        self.lost_host: str | None = None
        """Why a host on which ranks run is lost. This host never is."""
        self._parent = parent or os.getpid()
        self.stopped_s: dict[int, float] = {}
        """For each rank that is stopped (SIGSTOP), for how many seconds `look` has seen it so."""
        self.gone: tuple[int, ...] = ()
        """The ranks whose processes have ended."""
        self._processes: list[psutil.Process | None] = []
        for pid in self.pids:
            try:
                self._processes.append(psutil.Process(pid))
            except psutil.NoSuchProcess:
                self._processes.append(None)
        self._looked = time.monotonic()

    def look(self, at_most_s: float) -> None:
        """Updates `stopped_s` and `gone`.

        A stopped process is taken to have been so since the last look, but for at most `at_most_s`: in between this
        process may have been stopped itself.
        """
        now = time.monotonic()
        elapsed, self._looked = min(now - self._looked, at_most_s), now
        states = [self._state(rank) for rank in range(len(self.pids))]
        self.gone = tuple(rank for rank, state in enumerate(states) if state is None)
        stopped = [rank for rank, state in enumerate(states) if state == psutil.STATUS_STOPPED]
        self.stopped_s = {rank: self.stopped_s.get(rank, 0.0) + elapsed for rank in stopped}

    def name(self, rank: int | None) -> str:
        """How an error names a rank."""
        if rank is None:
            return "a rank" if len(self.pids) > 1 else self.name(0)
        return f"rank {rank} (process {self.pids[rank]})" if rank < len(self.pids) else f"rank {rank}"

    async def stacks(self, ranks: Iterable[int]) -> str:
        """The Python stacks of these ranks' threads, most recent call first.

        A stopped process is continued for this. It can write its stack only while it runs, so this is for processes
        that are killed next.
        """
        return stacks_text(await self.stacks_by_rank(ranks))

    async def stacks_by_rank(self, ranks: Iterable[int]) -> dict[int, str]:
        """The stacks of these ranks, without the ones that have ended."""
        alive = [rank for rank in ranks if rank < len(self.pids) and self._state(rank) is not None]
        return dict(zip(alive, await asyncio.gather(*(self._stack(rank) for rank in alive)), strict=True))

    async def _stack(self, rank: int) -> str:
        log = self.log_files[rank]
        start = log.stat().st_size if log.exists() else 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], _STACK_SIGNAL)
            os.kill(self.pids[rank], signal.SIGCONT)
        written, end = "", time.monotonic() + _STACK_WAIT_S
        while time.monotonic() < end:
            await asyncio.sleep(0.1)
            before, written = written, _read_from(log, start)
            if "  File " in written and written == before:
                break
        lines = [line for line in written.splitlines() if line.startswith(("Thread ", "Current thread ", "  File "))]
        more = [f"  ... {len(lines) - _STACK_LINES} more lines are in its log"] if len(lines) > _STACK_LINES else []
        return "\n".join(lines[:_STACK_LINES] + more) or f"none within {_STACK_WAIT_S:g} s: it does not run at all"

    def note(self, ranks: Iterable[int], text: str) -> None:
        """Appends a line of the controller's to these ranks' logs."""
        for rank in ranks:
            with contextlib.suppress(OSError), self.log_files[rank].open("a") as log:
                log.write(f"[the controller] {text}\n")

    async def fetch_states(self) -> None:
        """Brings states and logs up to date. On this host they always are."""

    def log_tail(self, num_lines: int = _LOG_TAIL_LINES) -> str:
        """The last lines of every process's log."""
        tails: list[str] = []
        for path in self.log_files:
            lines = path.read_text(errors="replace").splitlines()[-num_lines:] if path.exists() else []
            tails.append("\n".join([f"[{path.name}]", *lines]))
        return "\n".join(["--- last lines of its log ---", *tails])

    def kill(self) -> bool:
        """Kills every process that is still running, with its children. Returns whether there was one."""
        found = False
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process is not None and process.ppid() == self._parent:
                    started = process.children(recursive=True)
                    process.kill()
                    found = True
                    for each in started:
                        with contextlib.suppress(psutil.NoSuchProcess):
                            # Python's resource tracker ends by itself, and removes the semaphores of its dead parent.
                            if not any("resource_tracker" in argument for argument in each.cmdline()):
                                each.kill()
        return found

    async def ended(self, within_s: float) -> None:
        """Returns once the kernel has taken down every process, which takes a moment after `kill`, or gives up."""
        end = time.monotonic() + within_s
        while any(map(self._state, range(len(self.pids)))) and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def _state(self, rank: int) -> str | None:
        """The state of a rank's process; None if it has ended, even as a zombie."""
        process = self._processes[rank]
        try:
            if process is None or process.ppid() != self._parent:  # its id may have been used again
                return None
            state = process.status()
        except psutil.NoSuchProcess:
            return None
        return None if state in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else state


def stacks_text(stacks: Mapping[int, str]) -> str:
    """How an error shows the stacks of ranks."""
    return "\n".join(f"--- Python stack of rank {rank} ---\n{stack}" for rank, stack in stacks.items())


def _read_from(path: Path, start: int) -> str:
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")
