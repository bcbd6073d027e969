"""Runs Python code that a model wrote in a sandbox of its own, where it can do no harm, and kills it after its time.

The code sees /usr and the Python that runs it, read-only, and a scratch folder in memory. It has no network, no other
processes, no environment variables and no rights. docs/safety.md says what remains. The ways to build a sandbox:

* `bubblewrap`: the program bwrap.
* `namespaces`: the same namespaces by `unshare` of util-linux, with the mounts made by inner_run.py.
* `none`: no sandbox, only limits. The code runs as the current user, who can lose files and secrets to it.

Both real ways use new user, PID, mount, network, IPC and UTS namespaces, and need a kernel that lets ordinary users
make user namespaces. In both, inner_run.py filters system calls, and the sandbox is refused where the kernel accepts no
such filter. A controller that is root becomes "nobody" first, because limits on processes do not bind root.

    run_python --code--> stdin of `unshare ... python -c inner_run.py` --> limits, mounts, filter --> exec(code)
    run_python <--newline-- the sandbox is built: the time limit of the code begins
    run_python <--output-- up to the limit; then the whole session is killed
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary

from rl.checks import check_known
from rl.rollouts.guard import waiting

__all__ = ["Sandbox", "SandboxResult", "find_way", "run_python"]
Sandbox = Literal["auto", "bubblewrap", "namespaces", "none"]
_NOBODY = 65534
_PROBE_S = 30.0
_START_LIMIT_S = 60.0  # to build the sandbox, which takes 0.05 s on a host with a free core
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache")
# Lets "nobody" reach a Python in a folder of root's: in mounts of its own, everything but that Python is hidden.
_REVEAL = """set -e
umask 022
mount -t tmpfs -o size=64k,mode=755 tmpfs /sys
mkdir /sys/python
mount --rbind "$1" /sys/python
mount -t tmpfs -o size=64k,mode=755 tmpfs "$2"
mkdir -p "$1"
mount --move /sys/python "$1"
shift 2
exec "$@"
"""
_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """The result of running a piece of code."""

    output: str
    """What the code printed, truncated at the limit. If it raised, the last line is the error."""
    ok: bool
    """Whether it ended without an error and within the limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What code in a sandbox may use. The time limit is kept from outside."""

    memory_bytes: int
    """Address space of one process."""
    cpu_seconds: int
    """CPU time of one process."""
    num_processes: int
    """Processes and threads that the code may start. Not limited by `none`."""
    scratch_bytes: int
    """Size of the scratch folder /tmp, and of a file in it."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to build a sandbox."""

    name: Sandbox
    command: Callable[[Limits], list[str]]
    """The command that reads Python code from its standard input and runs it within limits. It prints a newline before
    the code's own output. Errors of the sandbox itself go to standard error."""


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
def find_way(sandbox: Sandbox = "auto") -> Way:
    """The way of that name, or for `auto` the first of bubblewrap and namespaces that works here.

    Tries it out, which takes some 0.1 s, and remembers what worked. Raises ValueError for an unknown name and, with the
    reason and what to do, if it does not work here.
    """
    check_known("sandbox", sandbox, (*_WAYS, "auto"))
    reasons: list[str] = []
    for way in (_WAYS["bubblewrap"], _WAYS["namespaces"]) if sandbox == "auto" else (_WAYS[sandbox],):
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


def _why_not(way: Way) -> str | None:
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


def _bubblewrap(limits: Limits) -> list[str]:
    mounts = [argument for path in _shown() for argument in _bubblewrap_mount(path)]
    return [
        *as_nobody(),
        *(program("bwrap"), "--unshare-user", "--disable-userns", "--unshare-ipc", "--unshare-pid", "--unshare-net"),
        *("--unshare-uts", "--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv"),
        *("--uid", str(_NOBODY), "--gid", str(_NOBODY), "--cap-drop", "ALL", "--hostname", "sandbox"),
        *mounts,
        *("--symlink", "/tmp", "/dev/shm", "--dir", "/tmp", "--remount-ro", "/"),
        *("--size", str(limits.scratch_bytes), "--perms", "1777", "--tmpfs", "/tmp", "--chdir", "/tmp"),
        *_python(limits),
    ]


def _bubblewrap_mount(path: str) -> tuple[str, str, str]:
    if Path(path).is_symlink():
        return ("--symlink", str(Path(path).readlink()), path)
    return ("--dev-bind" if path in _DEVICES else "--ro-bind", path, path)


def _namespaces(limits: Limits) -> list[str]:
    return [
        *as_nobody(),
        *(program("setpriv"), "--pdeathsig", "KILL"),
        *(program("unshare"), "--user", f"--map-user={_NOBODY}", f"--map-group={_NOBODY}", "--keep-caps", "--mount"),
        *("--pid", "--net", "--ipc", "--uts", "--cgroup", "--fork", "--kill-child=KILL"),
        *_python(limits),
        *(str(limits.scratch_bytes), *_shown()),
    ]


def _none(limits: Limits) -> list[str]:
    return _python(limits, sandboxed=False)


_WAYS = {way.name: way for way in (Way("bubblewrap", _bubblewrap), Way("namespaces", _namespaces), Way("none", _none))}


def _python(limits: Limits, sandboxed: bool = True) -> list[str]:
    """The command that runs `inner_run.py` without site-packages, with the limits as its arguments."""
    processes = limits.num_processes if sandboxed else -1  # outside, Linux would count all of the user's processes
    numbers = (limits.memory_bytes, limits.cpu_seconds, processes, limits.scratch_bytes, int(sandboxed))
    return [_interpreter(), "-I", "-S", "-B", "-c", _program(), *map(str, numbers)]


@cache
def _program() -> str:
    return Path(__file__).with_name("inner_run.py").read_text(encoding="utf-8")


@cache
def _interpreter() -> str:
    """The Python that runs, without its virtual environment."""
    return os.path.realpath(sys.executable)


@cache
def _shown() -> tuple[str, ...]:
    """The host's files and folders that the sandbox shows."""
    system = [path for path in _SYSTEM if os.path.lexists(path)]
    return (*system, *_python_folders(), *_DEVICES)


@cache
def _python_folders() -> tuple[str, ...]:
    """The folders of the running Python that are not in /usr."""
    folders = {os.path.realpath(folder) for folder in (sys.base_prefix, sys.base_exec_prefix)}
    return tuple(sorted(folder for folder in folders if Path("/usr") not in (Path(folder), *Path(folder).parents)))


def as_nobody() -> Sequence[str]:
    """What a command begins with so that root runs it as "nobody", who can still reach the running Python."""
    if os.geteuid() != 0 or not _is_mapped(_NOBODY):
        return ()
    reveal: list[str] = []
    for folder in _python_folders():
        reveal += [program("sh"), "-c", _REVEAL, "sh", folder, f"/{Path(folder).parts[1]}"]
    enter = [program("unshare"), "--mount", "--propagation", "private", *reveal] if reveal else []
    user = f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"
    return [*enter, program("setpriv"), *user, "--pdeathsig", "KILL", "--"]


def _is_mapped(user: int) -> bool:
    """Whether this process's user namespace has that user: a container may have only a few."""
    ranges = [[int(number) for number in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(first <= user < first + count for first, _, count in ranges)


@cache
def program(name: str) -> str:
    """The path of a program. Raises FileNotFoundError if it is not installed."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin:/sbin:/bin")
    if path is None:
        raise FileNotFoundError(f"{name} is not installed")
    return path
