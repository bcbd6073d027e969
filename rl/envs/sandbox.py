"""Runs Python code that a model wrote, in its own process with limits on time, memory and output.

These are limits, not a jail. The process runs as the current user and can access the network and everything that the
user may read. It is kept from starting other processes only as far as Python's audit events allow. If a model might do
harm, run ownloop in a container.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from weakref import WeakKeyDictionary

# Runs in the child before the model's code. Soft and hard limits are the same, so that the code cannot raise them.
_PRELUDE = """
import resource, sys
memory, seconds = int(sys.argv[1]), int(sys.argv[2])
for what, limit in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_FSIZE, 1 << 20),
                    (resource.RLIMIT_NOFILE, 32), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(what, (limit, limit))
forbidden = {"os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen"}
modules = {"ctypes", "_ctypes", "_posixsubprocess"}  # ways around these events
def refuse(event, arguments):
    if event in forbidden or event == "import" and arguments[0] in modules:
        raise PermissionError("no other process may be started here")
sys.addaudithook(refuse)
code = sys.stdin.read()
try:
    exec(compile(code, "<model>", "exec"), {"__name__": "__main__"})
except BaseException as error:
    sys.stdout.flush()
    print(f"{type(error).__name__}: {error}", file=sys.stdout)
    sys.exit(1)
"""


_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """The result of running a piece of code."""

    output: str
    """What the code printed, truncated at the limit. If it raised, the last line is the error."""
    ok: bool
    """Whether it ended without an error and within the limits."""


async def run_python(
    code: str, *, time_limit_s: float = 5.0, memory_bytes: int = 256 << 20, max_output_bytes: int = 4096
) -> SandboxResult:
    """Runs the code in an empty folder with an empty environment, and kills it at the time limit.

    At most two pieces of code per core run at the same time. Others wait, and waiting does not count towards the limit.
    """
    semaphore = _semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(2 * (os.cpu_count() or 1)))
    async with semaphore:
        with tempfile.TemporaryDirectory(prefix="ownloop-sandbox-") as folder:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-B", "-c", _PRELUDE, str(memory_bytes), str(int(time_limit_s) + 1)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                cwd=folder,
                env={},
                start_new_session=True,
            )
            output, ending = bytearray(), ""
            try:
                async with asyncio.timeout(time_limit_s):
                    await _communicate(process, code, output, max_output_bytes)
            except TimeoutError:
                ending = f"TimeoutError: over {time_limit_s:g} s"
            finally:
                # The whole session is killed, even after a normal end: the code may have started processes after all.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await _wait_for_end(process)
    if len(output) > max_output_bytes:
        ending = "..."  # an output beyond the limit is a failure as well
    text = output[:max_output_bytes].decode(errors="replace")
    if ending:
        return SandboxResult(output=f"{text}{ending}", ok=False)
    return SandboxResult(output=text.rstrip("\n"), ok=process.returncode == 0)


async def _communicate(process: asyncio.subprocess.Process, code: str, output: bytearray, max_bytes: int) -> None:
    """Sends the code and collects output until the process has ended or has printed more than `max_bytes`."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(code.encode(errors="replace"))
    process.stdin.close()
    while len(output) <= max_bytes:
        part = await process.stdout.read(max_bytes)
        if not part:
            await process.wait()
            return
        output += part


async def _wait_for_end(process: asyncio.subprocess.Process) -> None:
    """Waits for the end of a killed process.

    The rest of its output is read first. Otherwise asyncio, which stops reading once enough is buffered, would never
    see the end of the pipe, and `wait` would wait for that.
    """
    assert process.stdout is not None
    await process.stdout.read()
    await process.wait()
