"""The identity of this host, and how much memory it has left."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

# Names of a control group's limit and use, and the entries of its memory.stat that the kernel frees when it needs room.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_VERSION_2 = ("memory.max", "memory.current", ("active_file", "inactive_file", "slab_reclaimable"))


def host_identity() -> str:
    """Equal in two processes if one can open the other's descriptors: they share kernel and process namespace."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{Path('/proc/self/ns/pid').readlink()}"


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that this process can still allocate: the least of what the host and its control groups have left.

    A control group is any that this process is in, with all of its parents, of version 1 or 2. Files in the page cache
    count as available, because the kernel drops them when memory is needed. `root` holds `proc` and the mount points.
    """
    available = _sizes(root / "proc/meminfo")["MemAvailable:"] * 1024
    for group, (limit, used, reclaimable) in _control_groups(root):
        with contextlib.suppress(OSError, ValueError):  # no such file in a root group, or no limit ("max")
            left = int((group / limit).read_text()) - int((group / used).read_text())
            stat = _sizes(group / "memory.stat")
            available = min(available, left + sum(stat.get(name, 0) for name in reclaimable))
    return max(available, 0)


def _control_groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, tuple[str, ...]]]]:
    """The folders of this process's control groups and of their parents, each with the names of its files."""
    with contextlib.suppress(OSError):  # a kernel without control groups
        mounts = [line.split() for line in (root / "proc/self/mountinfo").read_text().splitlines()]
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            for mount in mounts:
                kind, options = mount[mount.index("-") + 1], mount[-1].split(",")
                if kind == ("cgroup" if controllers else "cgroup2") and (not controllers or "memory" in options):
                    names = _VERSION_1 if controllers else _VERSION_2
                    folder = root / mount[4].lstrip("/")
                    for parent in _below(PurePosixPath(path), PurePosixPath(mount[3])):
                        yield folder / parent, names


def _below(path: PurePosixPath, mounted: PurePosixPath) -> list[PurePosixPath]:
    """A group's path and those of its parents, relative to the group that is mounted, which is the last."""
    # A container may see a path outside of what it has mounted; its own group is then the mounted one.
    relative = path.relative_to(mounted) if path.is_relative_to(mounted) else PurePosixPath()
    return [relative, *relative.parents] if relative.parts else [relative]


def _sizes(file: Path) -> Mapping[str, int]:
    """The first number of each line, by the word before it."""
    return {words[0]: int(words[1]) for words in map(str.split, file.read_text().splitlines()) if len(words) > 1}
