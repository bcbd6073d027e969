"""The recorded rollouts of a run: written, cut back to a checkpoint, and replayed.

    loop --submit--> BackgroundWriter's queue --> its one thread --> disk
    loop <--room---- waits here while more than two pieces of work are queued

The loop hands over immutable values, and the thread works in the order of submission. The first error ends the writer:
the queue is dropped, and each later call raises the error.

    rollouts/step-00012.parquet   the rollouts that step 12 was trained on
             eval-00010.parquet   the rollouts of the evaluation after step 10

A file has a hidden name until all of it is on disk. So a killed run leaves whole files only. A run that resumes moves
aside the records after its checkpoint, so that no step is there twice. Nothing is destroyed: lines and files go to a
folder in `cut_off/`, under their own names.

In a replay, `RecordedEnv` takes the place of the environment. `controller.runs.rollout_source` then takes a step's
groups from the recording, with their tokens, log-probs, versions and rewards, and samples nothing. The trainer's side
of the loop runs as it did in the recorded run, or with another loss.
"""

import asyncio
import contextlib
import errno
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rl.algorithms.shaping import unshaped
from rl.protocols import Problem
from rl.rollouts.columns import count_groups, groups_to_table, parquet_bytes, read_groups
from rl.system.disk import write_whole
from rl.types import Group

MAX_WAITING = 2
"""Pieces of work, of a step or an evaluation each, that may wait for the disk while the loop continues."""
TRAINING = "step"
"""The first word in the names of files with training rollouts."""
_MAX_SUBMITTED = 8  # more only come from a loop that never awaits `room`
_FILE_NAME = re.compile(r"(?P<kind>\w+)-(?P<step>\d+)(-(?P<number>\d+))?\.parquet")
_NOT_RECORDED = Group(problem_id="", prompt="", rollouts=(), failures=("not recorded",))


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
        if self._error is None:  # after an error nothing more is written
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


def free_folder(parent: Path) -> Path:
    """A folder in `parent` that does not exist yet, named after the time."""
    name, number = time.strftime("%Y%m%d-%H%M%S"), 1
    while (path := parent / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path


def cut_lines(file: Path, length: int, into: Path) -> None:
    """Moves everything behind the first `length` bytes to a file of the same name in the folder `into`.

    Raises ValueError if the file is shorter than that, and `RecordingError` if there is no room for a copy.
    """
    size = file.stat().st_size if file.exists() else 0
    if size < length:
        raise ValueError(f"{file} has {size} bytes; it had {length} when the last checkpoint was saved")
    if size == length:
        return
    with file.open("rb+") as lines:
        lines.seek(length)
        into.parent.mkdir(exist_ok=True)
        write_whole(into / file.name, lines.read())
        lines.truncate(length)  # only now: whenever this is interrupted, no line is lost


def cut_recordings(directory: Path, lengths: Mapping[str, int], into: Path) -> None:
    """Moves the rollouts of later steps than `lengths` names for their kind, `rollouts/step` for example.

    Reads no file. Deletes the remains of files that a killed process was writing.
    """
    for partial in directory.glob(".*.partial"):
        partial.unlink()
    for kind, step, file in recorded_files(directory):
        if step > lengths.get(f"{directory.name}/{kind}", -1):
            (into / directory.name).mkdir(parents=True, exist_ok=True)
            shutil.move(file, into / directory.name)  # `rollouts` may be a link to another disk


class RecordedEnv:
    """The training rollouts of a run. Satisfies `rl.protocols.Env`, but has groups in place of problems."""

    def __init__(
        self, file: Path, groups_per_step: int, best_reward: float = 1.0, *, samples_again: bool = False
    ) -> None:
        """`file` is as `read_recording` takes it; `groups_per_step` the number of problems that a step asks for.

        `best_reward` is that of the environment that was recorded. A loop that `samples_again` asks several times.
        Raises ValueError if the file is not a recording, and if a step has more groups than are asked for.
        """
        self.file = file
        self.steps = read_recording(file)
        """Step -> its groups, in the order in which they were trained on."""
        self.best_reward = best_reward
        """See `rl.protocols.Env`."""
        self._groups_per_step = groups_per_step
        for step, number in self.steps.num_groups().items():
            if number > groups_per_step and not samples_again:
                raise ValueError(
                    f"step {step} of the recording {file} has {number} groups; prompts_per_step is {groups_per_step}"
                )

    def __str__(self) -> str:
        """The entry in a run's config file."""
        return f"recording {self.file}"

    @property
    def name(self) -> str:
        """See `rl.protocols.Env`."""
        return str(self)

    @property
    def stop(self) -> tuple[str, ...]:
        """None, because nothing is sampled."""
        return ()

    @property
    def num_steps(self) -> int:
        """The last step that was recorded."""
        return max(self.steps)

    def groups(self) -> Iterator[Group]:
        """The groups of all steps, in order."""
        return (group for step in sorted(self.steps) for group in self.steps[step])

    def train_groups(self, step: int, first: int, count: int) -> list[Group]:
        """The groups `first` to `first` + `count` - 1 of a step, which counts from 1; fewer if it had no more.

        Rewards are the environment's, which the loop shapes again if it shapes any. A group all of whose
        rollouts failed was not recorded; one without rollouts, at the end of the step, stands for it.
        Raises ValueError for a step after the last one.
        """
        if step > self.num_steps:
            raise ValueError(f"the recording {self.file} ends with step {self.num_steps}; step {step} is not there")
        groups = [unshaped(group) for group in self.steps.get(step, ())]
        groups += [_NOT_RECORDED] * (self._groups_per_step - len(groups))
        return groups[first : first + count]

    def train_problems(self, seed: int, start: int, count: int) -> list[Problem]:
        """Raises ValueError: recorded problems cannot be attempted again, so a loop has to use `train_groups`."""
        del seed, start, count
        raise ValueError(
            f"the recording {self.file} has no problems to attempt; a loop that can be replayed samples through "
            "`RolloutSource`"
        )

    def eval_problems(self, count: int) -> list[Problem]:
        """None: nothing is sampled, so nothing can be evaluated."""
        del count
        return []


def read_recording(path: Path) -> "RecordedSteps":
    """Step -> the groups that it trained on, from a run's folder `rollouts` or from a file of it.

    Raises ValueError if the path is missing or has no training rollouts, and for a file that is not a recording.
    """
    steps = RecordedSteps(path)
    if not steps:
        raise ValueError(f"the recording {path} holds no training rollouts")
    return steps


class RecordedSteps(Mapping[int, Sequence[Group]]):
    """The groups of each step, read from its Parquet files when they are asked for.

    Keeps one step in memory, since all steps of a long run may not fit.
    """

    def __init__(self, path: Path) -> None:
        """`path` is a folder of Parquet files, or one of them. Raises ValueError if there is nothing at `path`."""
        found = recorded_files(path if path.is_dir() else path.parent)
        self._files: dict[int, list[Path]] = {}
        for kind, step, file in found:
            if kind == TRAINING and (path.is_dir() or file == path):
                self._files.setdefault(step, []).append(file)
        if not self._files and not path.exists():
            raise ValueError(f"the recording {path} cannot be read: {os.strerror(errno.ENOENT)}")
        self._last: tuple[int, Sequence[Group]] = (-1, ())

    def __getitem__(self, step: int) -> Sequence[Group]:
        if self._last[0] != step:
            self._last = (step, [group for file in self._files[step] for group in read_groups(file)])
        return self._last[1]

    def __iter__(self) -> Iterator[int]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def num_groups(self) -> dict[int, int]:
        """Step -> the number of its groups; reads one small column of every file."""
        return {step: sum(map(count_groups, files)) for step, files in self._files.items()}
