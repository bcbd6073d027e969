"""Runs Python code that a model wrote in a sandbox of its own, where it can do no harm, and kills it after its time.

The code sees /usr and the Python that runs it, read-only, and a scratch folder in memory. It has no network, no other
processes, no environment variables and no rights. docs/safety.md says what remains, and `ways.py` how it is built: by
`namespaces` or `bubblewrap`, or by `none`, which has limits alone: the code runs as the current user.

Both real ways use new user, PID, mount, network, IPC and UTS namespaces, and need a kernel that lets this user make
them. In both, inner_run.py filters system calls, and the sandbox is refused where the kernel accepts no such filter. A
controller that is root becomes "nobody" first, because limits on processes do not bind root. Programs have the same
sandbox with a wider profile: `sandboxes.py`.

    run_python --code--> stdin of `python -c inner_run.py` --> limits, mounts, filter --> exec(code)
    run_python <--newline-- the sandbox is built: the time limit of the code begins
    run_python <--output-- up to the limit; then the whole session is killed
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary

from ownloop_sandbox.ways import Limits, bubblewrap, namespaces, none
from rl.checks import check_known
from rl.rollouts.guard import waiting

__all__ = ["Sandbox", "SandboxResult", "find_way", "run_python"]
Sandbox = Literal["auto", "bubblewrap", "namespaces", "none"]
_PROBE_S = 30.0
_START_LIMIT_S = 60.0  # to build the sandbox, which takes 0.05 s on a host with a free core
_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """The result of running a piece of code."""

    output: str
    """What the code printed, truncated at the limit. If it raised, the last line is the error."""
    ok: bool
    """Whether it ended without an error and within the limits."""


@dataclass(frozen=True, slots=True)
class Found:
    """A way that works here."""

    name: Sandbox
    command: Callable[[Limits], list[str]]
    """The command that reads Python code from its standard input and runs it within limits. It prints a newline before
    the code's own output. Errors of the sandbox itself go to standard error."""


_WAYS = {
    way.name: way for way in (Found("namespaces", namespaces), Found("bubblewrap", bubblewrap), Found("none", none))
}


async def run_python(
    code: str,
    *,
    sandbox: Sandbox = "auto",
    time_limit_s: float = 5.0,
    memory_bytes: int = 256 << 20,
    max_output_bytes: int = 4096,
    max_processes: int = 8,
    scratch_bytes: int = 16 << 20,
) -> SandboxResult:
    """Runs the code in a sandbox of its own, which has ended when this returns or is cancelled.

    The code may have `max_processes` processes and threads besides the one that it begins in. `memory_bytes` holds for
    each process. The code may write `scratch_bytes` to /tmp, its working directory. At most two pieces of code per core
    run at the same time. Others wait, and neither waiting nor building the sandbox counts towards the time limit.

    Raises ValueError if this host has no such sandbox, and RuntimeError if one could not be built this time.
    """
    way = find_way(sandbox)
    limits = Limits(
        memory_bytes=memory_bytes,
        cpu_seconds=int(time_limit_s) + 1,
        num_processes=max_processes,
        scratch_bytes=scratch_bytes,
    )
    # A sandbox has a /tmp of its own to work in. Without one, the host's has to do.
    folder = tempfile.TemporaryDirectory(prefix="ownloop-") if way.name == "none" else contextlib.nullcontext("/")
    semaphore = _semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(2 * (os.cpu_count() or 1)))
    with waiting():
        await semaphore.acquire()
    try:
        with folder as cwd:
            process, watched = await asyncio.get_running_loop().subprocess_exec(
                lambda: _Process(max_output_bytes), *way.command(limits), cwd=cwd, env={}, start_new_session=True
            )
            try:
                ending = await _ending(process, watched, code, time_limit_s)
            finally:
                # The whole session is killed, even after a normal end: without sandbox, processes may be left.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.get_pid(), signal.SIGKILL)
                process.close()  # else a process that escaped into a session of its own would keep the pipe open
                await watched.exited
    finally:
        semaphore.release()
    text = watched.output[:max_output_bytes].decode(errors="replace")
    if ending:
        return SandboxResult(output=f"{text}{ending}", ok=False)
    return SandboxResult(output=text.rstrip("\n"), ok=process.get_returncode() == 0)


async def _ending(process: asyncio.SubprocessTransport, watched: "_Process", code: str, time_limit_s: float) -> str:
    """Sends the code and waits for its end or that of its time.

    Returns what to append to the output: nothing if the code ended by itself, else the limit that ended it.
    """
    stdin = process.get_pipe_transport(0)
    assert isinstance(stdin, asyncio.WriteTransport)
    stdin.write(code.encode(errors="replace"))
    stdin.close()
    first = "FIRST_COMPLETED"
    with waiting():
        done, _ = await asyncio.wait((watched.begun, watched.closed), timeout=_START_LIMIT_S, return_when=first)
    if not watched.begun.done():
        reason = watched.errors.decode(errors="replace").strip() if done else f"not ready within {_START_LIMIT_S:g} s"
        raise RuntimeError(f"a sandbox could not be built: {reason or 'it ended without a word'}")
    await asyncio.wait((watched.full, watched.closed), timeout=time_limit_s, return_when=first)
    if watched.full.done():
        return "..."  # an output beyond the limit is a failure as well
    return "" if watched.closed.done() else f"TimeoutError: over {time_limit_s:g} s"


class _Process(asyncio.SubprocessProtocol):
    """Collects the output of a sandbox up to a limit."""

    def __init__(self, max_output_bytes: int) -> None:
        loop = asyncio.get_running_loop()
        self.output, self.errors = bytearray(), bytearray()
        self.begun, self.full, self.exited, self.closed = (loop.create_future() for _ in range(4))
        self._max_output_bytes = max_output_bytes

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Keeps what fits. The first byte of standard output says that the code begins."""
        if fd == 2:
            self.errors += data[: 4096 - len(self.errors)]
            return
        if not self.begun.done():
            self.begun.set_result(None)
            data = data[1:]
        room = self._max_output_bytes - len(self.output)
        self.output += data[:room]
        if len(data) > room and not self.full.done():
            self.full.set_result(None)

    def process_exited(self) -> None:
        """The process that was started has ended; others may hold its pipes."""
        self.exited.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The process has ended, and its pipes are closed."""
        del exc
        self.closed.set_result(None)


@cache
def find_way(sandbox: Sandbox = "auto") -> Found:
    """The way of that name, or for `auto` the first of namespaces and bubblewrap that works here.

    Tries it out, which takes some 0.1 s, and remembers what worked. Raises ValueError for an unknown name and, with the
    reason and what to do, if it does not work here.
    """
    check_known("sandbox", sandbox, (*_WAYS, "auto"))
    reasons: list[str] = []
    for way in (_WAYS["namespaces"], _WAYS["bubblewrap"]) if sandbox == "auto" else (_WAYS[sandbox],):
        reason = _why_not(way)
        if reason is None:
            return way
        reasons.append(f"{way.name}: {reason}")
    raise ValueError(
        f"sandbox is {sandbox!r}, and this host cannot run a model's code in one ({'; '.join(reasons)}). Install "
        "bubblewrap, which is often allowed what others are not, or allow user namespaces to ordinary users: sysctl "
        f"{_settings()}; a container needs that of its host and a seccomp profile that allows unshare and mount. "
        "sandbox='none' runs the code without one, as the current user, with all that this user may read, write and "
        "connect to"
    )


def _why_not(way: Found) -> str | None:
    """Why a way does not work here; None if it does."""
    limits = Limits(memory_bytes=256 << 20, cpu_seconds=10, num_processes=4, scratch_bytes=1 << 20)
    try:
        tried = subprocess.run(
            way.command(limits), input=b"print(6 * 7)", capture_output=True, env={}, timeout=_PROBE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if tried.stdout == b"\n42\n":
        return None
    lines = tried.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"it ended with status {tried.returncode}"


def _settings() -> str:
    """The kernel's settings that decide, with their values here."""
    names = (
        "user.max_user_namespaces",
        "kernel.unprivileged_userns_clone",
        "kernel.apparmor_restrict_unprivileged_userns",
    )
    files = {name: Path("/proc/sys", *name.split(".")) for name in names}
    found = [f"{name} (here {file.read_text().strip()})" for name, file in files.items() if file.is_file()]
    return ", ".join(found) or names[0]
