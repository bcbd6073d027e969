"""Writes the rollouts of a run, on a thread of its own, so that the loop's thread never waits for a disk.

Producer: the loop, which hands immutable values over. Consumer: the one thread of a `BackgroundWriter`, which works in
the order of submission. At most two pieces of work wait: then `room` waits for the disk, and so does the loop. The
first error ends the writer: everything that waits is dropped, and each later call raises the error.

    rollouts/step-00012.parquet   the rollouts that step 12 was trained on
             eval-00010.parquet   those of the evaluation after step 10

A file has a hidden name until all of it is on disk. So a killed run leaves whole files only.
"""

import asyncio
import contextlib
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rl.rollouts.columns import groups_to_table, parquet_bytes
from rl.system.files import write_whole
from rl.types import Group

MAX_WAITING = 2
"""Pieces of work, of a step or an evaluation each, that may wait for the disk while the loop goes on."""
TRAINING = "step"
"""The first word in the names of files with training rollouts."""
_MAX_SUBMITTED = 8  # more only come from a loop that never awaits `room`
_FILE_NAME = re.compile(r"(?P<kind>\w+)-(?P<step>\d+)(-(?P<number>\d+))?\.parquet")


class BackgroundWriter:
    """One thread that does what is submitted, in order. It ends with the process, after all that was submitted."""

    def __init__(self) -> None:
        """The thread starts with the first piece of work."""
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="recording")
        self._waiting: deque[Future[None]] = deque()
        self._error: BaseException | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Has `work` done after everything submitted before. Raises the error of earlier work.

        Blocks only if the loop has submitted eight pieces of work without awaiting `room`.
        """
        self.check()
        if len(self._waiting) >= _MAX_SUBMITTED:
            self._waiting[0].exception()
        self._waiting.append(self._executor.submit(self._do, work))

    def check(self) -> None:
        """Raises the error of earlier work, if there was one."""
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        if self._error is not None:
            raise self._error

    async def room(self) -> None:
        """Waits until at most `MAX_WAITING` pieces of work are left. Raises the error of earlier work."""
        await self._wait_for(MAX_WAITING)

    async def flush(self) -> None:
        """Waits until nothing is left. Raises the error of earlier work."""
        await self._wait_for(0)

    async def _wait_for(self, most: int) -> None:
        self.check()
        while len(self._waiting) > most:
            # `asyncio.wait` leaves the work alone if the loop is cancelled meanwhile.
            await asyncio.wait([asyncio.wrap_future(self._waiting[0])])
            self.check()

    def finish(self) -> None:
        """Blocks until nothing is left. Raises the error of earlier work."""
        for future in [*self._waiting]:
            future.exception()
        self.check()

    def _do(self, work: Callable[[], None]) -> None:
        if self._error is None:
            try:
                work()
            except BaseException as error:
                self._error = error


def write_rollouts(file: Path, groups: Sequence[Group], *, step: int | None = None, split: str | None = None) -> None:
    """Writes groups to a Parquet file, with a column `step` and a column `split` if they are given.

    Writes nothing if there are no rollouts. Raises `RecordingError` and leaves no file if the disk is full.
    """
    table = groups_to_table(groups)
    for place, (name, value) in enumerate([("step", step), ("split", split)]):
        if value is not None:
            table = table.add_column(place, name, pa.repeat(value, table.num_rows))
    if table.num_rows:
        write_whole(file, parquet_bytes(table))


def kind_of(split: str) -> str:
    """The first word in the names of files with the rollouts of a split."""
    return TRAINING if split == "train" else split


def free_file(directory: Path, step: int, split: str) -> Path:
    """The file for the rollouts of a step. A second file of the same step has a number behind it."""
    number = 1
    while (file := recording_of(directory, step, kind_of(split), number)).exists():
        number += 1
    return file


def recording_of(directory: Path, step: int, kind: str, number: int = 1) -> Path:
    """The file with the rollouts of a step, or the file of a step's second, third ... recording."""
    return directory / f"{kind}-{step:05d}{f'-{number}' if number > 1 else ''}.parquet"


def recorded_files(directory: Path, kind: str | None = None) -> list[tuple[str, int, Path]]:
    """(kind, step, file) of every file of rollouts, or of one kind, in order; none if there is no such directory."""
    found = sorted(_names(directory, kind))
    return [(each, step, directory / name) for each, step, _, name in found]


def recorded_steps(directory: Path, kind: str) -> NDArray[np.int64]:
    """The steps [N] with files of a kind, in order. Needs 8 bytes a step, so it suits runs of any length."""
    return np.unique(np.fromiter((step for _, step, _, _ in _names(directory, kind)), np.int64))


def _names(directory: Path, kind: str | None) -> Iterator[tuple[str, int, int, str]]:
    """(kind, step, number, name) of each file."""
    with os.scandir(directory) if directory.is_dir() else contextlib.nullcontext(()) as entries:
        for entry in entries:
            match = _FILE_NAME.fullmatch(entry.name)
            if match and kind in (None, match["kind"]):
                yield match["kind"], int(match["step"]), int(match["number"] or 1), entry.name


def last_steps(directory: Path) -> dict[str, int]:
    """rollouts/<kind> -> the last step recorded of that kind; reads names only."""
    return {f"{directory.name}/{kind}": step for kind, step, _ in recorded_files(directory)}
