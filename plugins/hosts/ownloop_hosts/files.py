"""Files on other hosts: read, written and removed there by the host's agent, piece by piece.

The pieces travel as messages, with TLS where the hosts have it. A few are under way at a time, so neither side ever
holds a file in its memory.
"""

import asyncio
import shutil
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

_PIECE_BYTES = 4 << 20
_PIECES_AHEAD = 4
_REPORT_EVERY_S = 10.0


class OtherHost(Protocol):
    """Another host, whose agent answers questions. `ownloop_hosts.remote_host.Host` is one."""

    @property
    def name(self) -> str:
        """The name that messages show."""
        ...

    async def ask(self, question: Callable[..., object], *args: object) -> Any:
        """Calls a function there. Raises its exceptions, and `HostLostError`."""
        ...


class Progress:
    """Says how much of a transfer is done, every ten seconds."""

    def __init__(self, what: str, num_bytes: int) -> None:
        """`num_bytes` are to be transferred in all."""
        self._what = what
        self._num_bytes = num_bytes
        self._done = 0
        self._said = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Counts bytes that have arrived."""
        self._done += num_bytes
        if time.monotonic() - self._said > _REPORT_EVERY_S:
            self._said = time.monotonic()
            print(f"{self._what}: {self._done / 1e9:.2f} of {self._num_bytes / 1e9:.2f} GB", flush=True)


async def fetch(host: OtherHost, there: Path, here: Path, num_bytes: int, progress: Progress) -> None:
    """Copies a file of `num_bytes` from another host. Raises OSError if it has become shorter, or cannot be written."""
    await asyncio.to_thread(here.parent.mkdir, parents=True, exist_ok=True)

    async def piece(offset: int) -> None:
        data: bytes = await host.ask(read_piece, there, offset)
        if len(data) != min(_PIECE_BYTES, num_bytes - offset):
            raise OSError(f"{there} on host {host.name} became shorter while it was read")
        await asyncio.to_thread(write_piece, here, offset, data)
        progress.add(len(data))

    await _in_order(piece, num_bytes)


async def send(host: OtherHost, here: Path, there: Path, progress: Progress) -> None:
    """Copies a file to another host. Raises OSError if it cannot be read, or written there."""

    async def piece(offset: int) -> None:
        data = await asyncio.to_thread(read_piece, here, offset)
        await host.ask(write_piece, there, offset, data)
        progress.add(len(data))

    await _in_order(piece, here.stat().st_size)


async def _in_order(piece: Callable[[int], Awaitable[None]], num_bytes: int) -> None:
    """Transfers all pieces of a file, a few at a time. An empty file is one empty piece."""
    pending: deque[asyncio.Future[None]] = deque()
    try:
        for offset in range(0, max(num_bytes, 1), _PIECE_BYTES):
            if len(pending) == _PIECES_AHEAD:
                await pending.popleft()
            pending.append(asyncio.ensure_future(piece(offset)))
        while pending:
            await pending.popleft()
    finally:
        for each in pending:
            each.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


def sizes_below(folder: Path) -> Mapping[str, int]:
    """The files in a folder and its folders, by their path in it, with their sizes. Empty if there is no folder."""
    return {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}


def read_piece(file: Path, offset: int) -> bytes:
    """At most `_PIECE_BYTES` of a file."""
    with file.open("rb") as stream:
        stream.seek(offset)
        return stream.read(_PIECE_BYTES)


def write_piece(file: Path, offset: int, data: bytes) -> None:
    """Writes into a file, which is made if need be. Pieces may come in any order."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    with file.open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)


class Unfinished:
    """The folders that this process, an agent, removes if it ends now."""

    folders: set[Path] = set()  # noqa: RUF012


def make_room(folder: Path) -> None:
    """Makes the parents of a folder that is to be written, and later removed. Raises ValueError if that cannot be."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{folder.parent} cannot be written: {error.strerror}; checkpoints and models are written there before the "
            "controller collects them, so choose a folder for the run (--runs) that every host can write"
        ) from error
    Unfinished.folders.add(folder)


def remove(folder: Path) -> None:
    """Removes a folder if it is there, complete or not, and its parent if that is empty then."""
    for each in (folder, hidden(folder)):
        shutil.rmtree(each, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()
    Unfinished.folders.discard(folder)


@contextmanager
def removed_at_end(folder: Path) -> Generator[None]:
    """Within the block, a folder is removed if the agent ends."""
    Unfinished.folders.add(folder)
    try:
        yield
    finally:
        Unfinished.folders.discard(folder)


def remove_unfinished() -> None:
    """Removes the folders that will not be collected any more."""
    for folder in tuple(Unfinished.folders):
        remove(folder)


def hidden(folder: Path) -> Path:
    """Where a folder lies while it is written; see `trainer.engines.pytorch.checkpoint.begin`."""
    return folder.with_name(f".{folder.name}.partial")


def has(file: Path) -> bool:
    """Whether a file or a folder is there."""
    return file.exists()
