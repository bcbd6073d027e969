"""What a process keeps on a disk: files that are whole after a crash, a cache, and temporary folders.

A reader finds a file's old contents or its new ones, and a file of JSON lines ends with a whole line or with one that
`drop_unfinished_line` removes. A temporary folder vanishes with the process that made it: the process holds a lock on
the folder, which the kernel releases however the process ends, and the next one to make a folder with the same prefix
removes the folders that are no longer locked.
"""

import dataclasses
import fcntl
import json
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rl.system.secret_fields import hide_all, is_declared

if TYPE_CHECKING:
    import pyarrow as pa

_BLOCK = 1 << 16
_LOCK = ".lock"
_MEMORY = Path("/dev/shm")
_LONGEST_TMPDIR = 80  # Monarch puts sockets two names deeper there, and a socket's path has at most 107 bytes


class RecordingError(RuntimeError):
    """A file of the run could not be written, because the disk is full for example. Names the file and the reason."""

    def __init__(self, file: Path, error: OSError) -> None:
        """`error` is the operating system's."""
        self.file, self.reason = file, error.strerror or str(error)
        super().__init__(f"{file} cannot be written: {self.reason}")


def write_whole(file: Path, contents: "bytes | pa.Buffer", *, private: bool = False) -> None:
    """Writes a file that other processes and later runs see whole or not at all: they find the old one or the new.

    Only its owner can read a `private` file. Raises `RecordingError`.
    """
    partial = file.with_name(f".{file.name}.partial")
    try:
        file.parent.mkdir(exist_ok=True)
        partial.unlink(missing_ok=True)  # what a killed process left would keep its permissions
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(contents)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
        sync_directory(file.parent)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise RecordingError(file, error) from error


def sync_directory(path: Path) -> None:
    """Makes sure that the names in a directory are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(file: Path, value: object, *, private: bool = False) -> None:
    """Writes a JSON file: a reader, or a run after a crash, finds the old contents or the new.

    Only its owner can read a `private` file. Raises `RecordingError` if it cannot be written.
    """
    write_whole(file, (json.dumps(to_json(value), indent=2) + "\n").encode(), private=private)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError, naming the file, if it is damaged."""
    try:
        value: object = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file} is damaged: it holds no object")
    return cast("dict[str, Any]", value)


def to_json(value: object) -> Any:
    """`value` in JSON types. Dataclasses become objects, functions "module:name", numbers that are not finite null.

    Fields that are declared as `Secret` are hidden. Values of any other type become their text.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {name: hide_all(item) if is_declared(type(value), name) else item for name, item in fields.items()}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in cast("Mapping[object, object]", value).items()}
    if isinstance(value, np.ndarray | np.generic):
        return to_json(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in cast("Sequence[object]", value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if callable(value):
        return f"{value.__module__}:{value.__qualname__}"
    return str(value)


def append_line(file: Path, row: object) -> None:
    """Writes a value in JSON types as one line, at once. Raises `RecordingError`, with the file as it was before."""
    line = (json.dumps(row, allow_nan=False) + "\n").encode()
    length: int | None = None
    try:
        with file.open("ab", buffering=0) as stream:
            length = stream.seek(0, os.SEEK_END)
            if (written := stream.write(line)) < len(line):  # only the next write says why
                stream.write(line[written:])
    except OSError as error:
        if length is not None:
            os.truncate(file, length)
        raise RecordingError(file, error) from error


def sync_file(file: Path) -> None:
    """Makes sure that every line is on the disk. Raises `RecordingError`."""
    try:
        with file.open("ab") as stream:
            os.fsync(stream.fileno())
        sync_directory(file.parent)
    except OSError as error:
        raise RecordingError(file, error) from error


def drop_unfinished_line(file: Path) -> None:
    """Cuts off everything after the last newline. Reads no more of the file than that."""
    if not file.exists():
        return
    with file.open("rb+") as stream:
        end = stream.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _BLOCK)
            stream.seek(start)
            newline = stream.read(end - start).rfind(b"\n")
            if newline >= 0:
                stream.truncate(start + newline + 1)
                return
            end = start
        stream.truncate(0)


def cache_directory() -> Path:
    """For what can be made again: $OWNLOOP_CACHE, else ownloop's folder in $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("OWNLOOP_CACHE"):
        return Path(own).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "ownloop"


def check_temporary_folder() -> None:
    """Raises ValueError if TMPDIR is no folder in which processes can meet. Python itself then takes another one."""
    path = os.environ.get("TMPDIR", "/tmp")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"TMPDIR is {path!r}, which is no folder that can be written; name another, or unset it")
    if (length := len(os.fsencode(path))) > _LONGEST_TMPDIR:
        raise ValueError(f"TMPDIR is {path!r}, of {length} bytes; it may have {_LONGEST_TMPDIR}, for sockets' names")


class OwnedFolder:
    """A folder that only its owner can enter. It is removed at the end of the process, or later if that was killed."""

    def __init__(self, prefix: str, *, in_memory: bool = False) -> None:
        """Makes it among the temporary files; with `in_memory` where no disk ever sees it, if the host has that."""
        has_memory = in_memory and os.access(_MEMORY, os.W_OK | os.X_OK)
        parent = _MEMORY if has_memory else Path(tempfile.gettempdir())
        _remove_abandoned(parent, prefix)
        # It gets its name once it is locked, so that no other process takes it for abandoned in between.
        made = Path(tempfile.mkdtemp(prefix=".ownloop-", dir=parent))
        self._lock = (made / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(parent / f"{prefix}{made.name.removeprefix('.ownloop-')}")
        self._finalizer = weakref.finalize(self, _remove, self.path, os.getpid())

    @contextmanager
    def takes_temporary_files(self) -> Generator[None]:
        """Within the block, `tempfile` makes its files in this folder, in every thread."""
        before, tempfile.tempdir = tempfile.tempdir, str(self.path)
        try:
            yield
        finally:
            tempfile.tempdir = before

    def remove(self) -> None:
        """Removes it now. May be called again."""
        self._finalizer()


def _remove_abandoned(parent: Path, prefix: str) -> None:
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # it is someone else's, it is held, or another process removes it too
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked process has the same finalizers
        shutil.rmtree(folder, ignore_errors=True)
