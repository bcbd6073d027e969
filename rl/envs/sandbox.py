"""Python that a model wrote, in a process of its own with limits on time, memory and output.

Limits, not a jail: the process runs as this user, and sees the network and what the user may read. It may start no
other process, as far as Python's audit events can tell. Where a model might do harm, run ownloop in a container.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from weakref import WeakKeyDictionary

# In the child, before it runs the code; a limit that the code could raise again is a hard one.
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


_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """What came of a piece of code."""

    output: str
    """What it printed, the last line an error's if it raised; cut off at the limit."""
    ok: bool
    """Whether it ran to its end."""


async def run_python(
    code: str, *, time_limit_s: float = 5.0, memory_bytes: int = 256 << 20, max_output_bytes: int = 4096
) -> SandboxResult:
    """Runs the code in an empty folder with an empty environment, and ends it.

    At the same time run at most two per core; others wait their turn, which does not count for their limit.
    """
    slots = _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(2 * (os.cpu_count() or 1)))
    async with slots:
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
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await _end_of(process)
    if len(output) > max_output_bytes:
        ending = "..."
    text = output[:max_output_bytes].decode(errors="replace")
    if ending:
        return SandboxResult(output=f"{text}{ending}", ok=False)
    return SandboxResult(output=text.rstrip("\n"), ok=process.returncode == 0)


async def _communicate(process: asyncio.subprocess.Process, code: str, output: bytearray, max_bytes: int) -> None:
    """Until the process has ended, or printed more than so much."""
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


async def _end_of(process: asyncio.subprocess.Process) -> None:
    """Of a killed process. What it printed is read first: asyncio stops reading when a few pages are waiting, then sees
    no end of the pipe, and `wait` waits for that."""
    assert process.stdout is not None
    await process.stdout.read()
    await process.wait()
