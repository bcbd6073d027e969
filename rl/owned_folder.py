"""Temporary folders that vanish with the process that made them, even if it was killed.

The process holds a lock on its folder, which the kernel releases however the process ends. Whoever makes a folder with
the same prefix removes those of this user that nobody holds any more.
"""

import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK = ".lock"
_MEMORY = Path("/dev/shm")


class OwnedFolder:
    """A folder that only its owner can enter. It is removed at the end of the process, or later if that was killed."""

    def __init__(self, prefix: str, *, in_memory: bool = False) -> None:
        """Makes it among the temporary files; with `in_memory` where no disk ever sees it, if the host has that."""
        has_memory = in_memory and os.access(_MEMORY, os.W_OK | os.X_OK)
        parent = _MEMORY if has_memory else Path(tempfile.gettempdir())
        _remove_abandoned(parent, prefix)
        # It gets its name once it is locked: nobody can take it for abandoned in between.
        made = Path(tempfile.mkdtemp(prefix=".ownloop-", dir=parent))
        self._lock = (made / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(parent / f"{prefix}{made.name.removeprefix('.ownloop-')}")
        self._finalizer = weakref.finalize(self, _remove, self.path, os.getpid())

    @contextmanager
    def takes_temporary_files(self) -> Generator[None]:
        """What `tempfile` makes meanwhile, in any thread, is in this folder."""
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
