"""The files of a run: one folder with its configuration, metrics, rollouts and logs, readable while it grows.

    runs/<name>/config.json       the configuration, as given, without its secrets
                recipe.json       the recipe it came from, for `ownloop run --resume`; only its owner can read it
                host.json         hardware and versions of the latest start
                began.json        when the run began: the date that its chat template sees
                finished.json     says that the run came to its end
                metrics.jsonl     one line per step and per evaluation
                rollouts/         one Parquet file per step and per evaluation, see controller/runs/recording.py
                sessions/         of a run of programs, see ownloop_agents/sessions.py
                reward.png        see ownloop_report/plot.py
                report.html       see ownloop_report/page.py
                timeline.json     see rl/system/timeline.py
                first_weights/    of a fork with weights alone: the checkpoint that it began with
                checkpoints/      see controller/runs/checkpoints.py
                model/            the trained model, in Hugging Face's format
                logs/             the output of processes and libraries
                cut_off/          what a resumed run had written after its checkpoint, see controller/runs/recording.py

Every line is complete when it is written, and so is every Parquet file. A line that a killed process left unfinished is
dropped when the run is resumed. JSON has no NaN, so numbers that are not finite are stored as null. Only one process at
a time writes to a folder. The folder of an earlier schema is refused: see
controller/runs/metric_rows.py.
"""

import contextlib
import fcntl
import re
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TextIO
from weakref import WeakMethod, WeakValueDictionary

from controller.runs.metric_rows import SCHEMA_VERSION, metric_rows
from controller.runs.recording import (
    BackgroundWriter,
    cut_lines,
    cut_recordings,
    free_file,
    free_folder,
    kind_of,
    last_steps,
    write_rollouts,
)
from rl.system.disk import RecordingError, append_line, drop_unfinished_line, read_json, sync_file, to_json, write_json
from rl.system.timeline import wall_time
from rl.types import Group

CONFIG_FILE = "config.json"
METRICS = "metrics.jsonl"
HOST_FILE = "host.json"
ROLLOUTS = "rollouts"
SESSIONS = "sessions"
CUT_OFF = "cut_off"
BEGAN_FILE = "began.json"
"""Says when the run began. The date that a chat template sees stays the same in a resumed run."""
FINISHED_FILE = "finished.json"
"""Says that the run came to its end, and of how many steps it was then."""
FINISHED = "finished"
"""The state of a run that has come to its end."""
FIRST_WEIGHTS = "first_weights"
"""What a run began with that was forked with the weights of a checkpoint alone, in a checkpoint's layout."""
LOOP_FILE = "loop.json"
"""The first file of a checkpoint: its step, and under `trainers` the names of the parts that make it complete."""
_MIN_FREE_BYTES = 256 * 2**20
_failed: "WeakValueDictionary[Path, RunFolder]" = WeakValueDictionary()


class RunFolder:
    """One run's folder. Creating it checks that it can be written, so that a run does not fail at its first step."""

    def __init__(
        self,
        path: Path,
        config: object,
        *,
        resume: bool = False,
        began: datetime | None = None,
        min_free_bytes: int = _MIN_FREE_BYTES,
    ) -> None:
        """Creates the folder and writes `config` (a dataclass) to it. With `resume` it continues the run in the folder.

        A new run began at `began`, by default now. Raises ValueError if `path` holds another run or other files, cannot
        be written, or is used by another `RunFolder` of any process, or if its disk has less than `min_free_bytes`.
        """
        self.path = path.absolute()
        self.resumed = resume
        """Whether the run began earlier, so that its loop continues after its last checkpoint."""
        is_run = (self.path / CONFIG_FILE).is_file() and self.logs.is_dir()
        _check_free_to_use(self.path, is_run=is_run, resume=resume)
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self.command = ""
        """The command that starts the same run again, which its report shows."""
        self.loop_end = LoopEnd()
        self.saving = False
        """Whether the run was stopped and its last finished step is being saved."""
        self._writer = BackgroundWriter()
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path).free
            if free < min_free_bytes:
                _remove_empty([self.logs, *self._made])
                raise ValueError(
                    f"run folder {path}: {free >> 20} MiB are free there; a run needs {min_free_bytes >> 20}"
                )
            self._lock = _locked(self.path / ".lock")  # released with this object or its process
            drop_unfinished_line(self.metrics_file)
            write_json(self.path / CONFIG_FILE, to_json(config))
            self.began = _begin(self.path, began or datetime.now())
            """When the run began, in local time. A resumed run began when it was first started."""
        except BlockingIOError:
            raise ValueError(
                f"run folder {path} is in use by another run, in this process or another; end that first"
            ) from None
        except (RecordingError, OSError) as error:
            if not resume:  # the next try finds the folder free; once it is locked, all in it is ours
                self.discard() if hasattr(self, "_lock") else _remove_empty([self.logs, *self._made])
            reason = error.reason if isinstance(error, RecordingError) else error.strerror
            raise ValueError(f"run folder {path} cannot be written: {reason}") from error
        self._recorded = last_steps(self.rollouts)

    @property
    def logs(self) -> Path:
        """The folder for the output of processes and libraries."""
        return self.path / "logs"

    @property
    def config(self) -> Mapping[str, Any]:
        """The run's configuration in JSON types, without secrets."""
        return read_json(self.path / CONFIG_FILE)

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints. It exists from the first checkpoint on."""
        return self.path / "checkpoints"

    @property
    def metrics_file(self) -> Path:
        """One JSON object per step and per evaluation."""
        return self.path / METRICS

    @property
    def rollouts(self) -> Path:
        """The folder of recorded rollouts. It exists from the first step with rollouts on."""
        return self.path / ROLLOUTS

    def begin_again(self) -> None:
        """The run's loop has failed and begins again after the newest checkpoint, in this process."""
        self.resumed = True
        _failed.pop(self.path, None)

    def loop_failed(self) -> None:
        """The loop ends by an error, which in a notebook keeps this alive. A new `RunFolder` may take its place."""
        _failed[self.path] = self

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Appends the metrics of a step or an evaluation. Raises `RecordingError` for any earlier write that failed."""
        self._writer.check()
        append_line(self.metrics_file, to_json({**metrics, "time": wall_time(), "schema_version": SCHEMA_VERSION}))

    def log_rollouts(self, step: int, groups: Sequence[Group], *, split: str = "train") -> None:
        """Writes every rollout of these groups in the background; `flush` waits for it.

        Raises `RecordingError` if an earlier write failed.
        """
        directory, groups = self.rollouts, tuple(groups)
        self.in_background(lambda: write_rollouts(free_file(directory, step, split), groups, step=step, split=split))
        kind = f"{ROLLOUTS}/{kind_of(split)}"
        self._recorded[kind] = max(step, self._recorded.get(kind, step))

    def in_background(self, work: Callable[[], None]) -> None:
        """Writes a file of the run on another thread, after everything that was handed over before.

        Raises the error of earlier work; `RecordingError` if the disk is full.
        """
        self._writer.submit(work)

    def mark_finished(self) -> None:
        """Records that the run has come to its end, after everything handed over before is written."""
        num_steps = read_json(self.path / CONFIG_FILE).get("num_steps")
        self.in_background(partial(write_json, self.path / FINISHED_FILE, {"num_steps": num_steps}))

    async def room(self) -> None:
        """Waits while too much waits for the disk. Raises the error of earlier work."""
        await self._writer.room()

    async def sync(self) -> None:
        """Returns once everything logged so far is on the disk. Raises the error of earlier work."""
        self._writer.submit(partial(sync_file, self.metrics_file))
        await self._writer.flush()

    def flush(self) -> None:
        """Blocks until everything handed over is on disk. Raises the error of earlier work."""
        self._writer.finish()

    def close(self) -> None:
        """Lets another `RunFolder` continue the run, once everything is written. Raises the error of earlier work."""
        try:
            self._writer.finish()
        finally:
            self._lock.close()

    def lengths(self) -> dict[str, int]:
        """How far every file that grows has got: what `cut_back` takes.

        `metrics.jsonl` is a number of bytes; `rollouts/step` and `rollouts/eval` are the last steps handed over.
        """
        return {METRICS: self.metrics_file.stat().st_size if self.metrics_file.exists() else 0, **self._recorded}

    def cut_back(self, lengths: Mapping[str, int]) -> Path | None:
        """Moves everything that was written after `lengths` was taken to a new folder in `cut_off/`.

        Returns that folder, or None if there was nothing to move. `{}` stands for the beginning of the run. Raises
        ValueError if a file is shorter than it was, so that it was changed from outside.
        """
        self._writer.finish()
        into = free_folder(self.path / CUT_OFF)
        cut_lines(self.metrics_file, lengths.get(METRICS, 0), into)
        cut_recordings(self.rollouts, lengths, into)
        self._recorded = last_steps(self.rollouts)
        return into if into.exists() else None

    def checkpoint_path(self, step: int) -> Path:
        """The directory for the checkpoint of a step."""
        return self.checkpoints / f"step-{step:05d}"

    def complete_checkpoints(self) -> list[Path]:
        """The directories of complete checkpoints, in the order of their steps."""
        return complete_checkpoints(self.checkpoints)

    def metrics(self) -> list[dict[str, float]]:
        """All rows logged so far, in order. Numbers that were not finite are NaN."""
        return read_metrics(self.metrics_file)

    def discard(self) -> None:
        """Removes the folder and its parents as far as this object made them, and everything that is in the folder.

        For a new run that is refused before its first step. A folder that was there, and empty, is left so.
        """
        self._writer.finish()
        for path in self.path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        _remove_empty(self._made)

    @contextlib.contextmanager
    def discarded_on_failure(self) -> Generator[None]:
        """Discards the folder if the block, which writes what a new run begins with, raises."""
        try:
            yield
        except BaseException:
            self.discard()
            raise

    def saved(self) -> str:
        """The current contents of the folder, in a few words for the user."""
        last_step = int(max((row["step"] for row in metric_rows(self.metrics_file)), default=0))
        parts = [f"metrics and rollouts of {last_step} steps"]
        complete = self.complete_checkpoints()
        if complete:
            parts.append(f"{len(complete)} checkpoint{'s' * (len(complete) > 1)}, the last {complete[-1].name}")
        else:
            parts.append("no checkpoint")
        return f"{', '.join(parts)} in {self.path}"


class LoopEnd:
    """Methods to call when a run's loop has ended, for any reason, while the processes that it started still live.

    The folder refers to them weakly: otherwise it would keep alive the objects that hold it, and with them its lock. An
    object that is gone by then was closed by its owner.
    """

    def __init__(self) -> None:
        """There are no methods yet."""
        self._methods: list[WeakMethod[Callable[[], None]]] = []

    def call(self, method: Callable[[], None]) -> None:
        """Adds a bound method. It is called once."""
        self._methods.append(WeakMethod(method))

    def has_come(self) -> None:
        """Calls the methods, in order."""
        methods, self._methods = self._methods, []
        for weak in methods:
            if (method := weak()) is not None:
                method()


def check_run_schema(run: Path) -> None:
    """Raises ValueError for a run of another schema, by the first row of its metrics."""
    next(metric_rows(run / METRICS), None)


def read_metrics(file: Path) -> list[dict[str, float]]:
    """All rows of a `metrics.jsonl`, as `metric_rows` reads them."""
    return [*metric_rows(file)]


def began_at(run: Path) -> datetime | None:
    """When the run in this folder began; None if no file says so. Raises ValueError if the file is damaged."""
    file = run / BEGAN_FILE
    if not file.is_file():
        return None
    try:
        return datetime.fromisoformat(read_json(file)["time"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None


def complete_checkpoints(directory: Path) -> list[Path]:
    """The directories in `directory` that hold all parts of a checkpoint, in the order of their steps."""
    steps: dict[Path, int] = {}
    for file in directory.glob(f"step-*/{LOOP_FILE}"):
        if not is_checkpoint(file.parent):
            continue
        loop = read_json(file)
        if not isinstance(loop.get("step"), int) or not isinstance(loop.get("trainers"), list):
            raise ValueError(f"{file} is damaged: it lacks 'step' or 'trainers'")
        if all((file.parent / name).is_dir() for name in loop["trainers"]):
            steps[file.parent] = loop["step"]
    return sorted(steps, key=lambda path: steps[path])


def is_checkpoint(path: Path) -> bool:
    """Whether a folder has the name of a checkpoint, hidden or not. Other names, such as a copy's, are the user's."""
    return path.is_dir() and re.fullmatch(r"\.?step-\d+", path.name) is not None


def state_of(run: Path) -> str:
    """ "running"; "finished"; or "stopped", and whether there is a checkpoint to resume from.

    A run that is resumed with more steps is not finished before it has done them.
    """
    if is_running(run):
        return "running"
    if is_finished(run):
        return FINISHED
    complete = complete_checkpoints(run / "checkpoints")
    return f"stopped, saved at {int(complete[-1].name.rpartition('-')[2])}" if complete else "stopped, nothing saved"


def is_finished(run: Path) -> bool:
    """Whether the run came to the end of the steps that its configuration asks for."""
    if not (run / FINISHED_FILE).is_file():
        return False
    num_steps = read_json(run / CONFIG_FILE).get("num_steps")
    return read_json(run / FINISHED_FILE).get("num_steps") == num_steps


def is_running(run: Path) -> bool:
    """Whether a process of this host holds the run's lock. Does not touch the lock, so that no run is refused it."""
    try:
        status = (run / ".lock").stat()
        locks = Path("/proc/locks").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(  # the kernel's list: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE
        line.split()[1] == "FLOCK" and line.split()[5].rpartition(":")[2] == str(status.st_ino)
        for line in locks.splitlines()
        if "->" not in line  # one that waits
    )


def check_ended(run: Path) -> None:
    """Raises ValueError if a process of this host holds the run's folder."""
    if is_running(run):
        raise ValueError(f"{run} is running; wait for its end, or choose another --name")


def _begin(run: Path, now: datetime) -> datetime:
    """When the run began, which is `now` if no file says so; afterwards one does."""
    began = began_at(run) or now
    write_json(run / BEGAN_FILE, {"time": began.isoformat()})
    return began


def _locked(file: Path) -> TextIO:
    """The file with its lock, which a `RunFolder` gives up whose loop failed. Raises BlockingIOError if it is held."""
    if (failed := _failed.pop(file.parent, None)) is not None:
        failed.loop_end.has_come()
        with contextlib.suppress(RecordingError):  # which ended that loop
            failed.close()
    lock = file.open("w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def _check_free_to_use(path: Path, *, is_run: bool, resume: bool) -> None:
    """Raises ValueError unless `path` is a run to resume, or is free for a new one."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"run folder {path} is a file; name a new folder")
    if resume and not is_run:
        raise ValueError(f"run folder {path} holds no run to resume")
    if not resume and is_run:
        raise ValueError(f"run folder {path} already holds a run; name a new folder")
    if not is_run and path.is_dir() and any(path.iterdir()):
        raise ValueError(f"run folder {path} exists and is not a run's; name a new or empty folder")


def _remove_empty(folders: Sequence[Path]) -> None:
    """Removes the folders that are empty. Another run in the same place may have begun in the meantime."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
