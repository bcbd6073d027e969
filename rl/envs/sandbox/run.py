"""Runs code in a sandbox from an event loop, and keeps the limits on time and output."""

import asyncio
import contextlib
import os
import signal
import tempfile
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from rl.envs.sandbox.ways import Limits, Sandbox, find_way
from rl.rollouts.guard import waiting

_START_LIMIT_S = 60.0  # to build the sandbox, which takes 0.05 s on a host with a free core
_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """The result of running a piece of code."""

    output: str
    """What the code printed, truncated at the limit. If it raised, the last line is the error."""
    ok: bool
    """Whether it ended without an error and within the limits."""


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
        """The process has ended and nobody holds its pipes."""
        del exc
        self.closed.set_result(None)
