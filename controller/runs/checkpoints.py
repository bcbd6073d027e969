"""Checkpoints: everything that a run needs to continue after any end, saved every few steps.

A checkpoint is one directory, `checkpoints/step-00010`. It holds `loop.json` and a directory per trainer, under the
trainer's name. `loop.json` is written first, and a trainer's directory appears only when it is complete. So a
checkpoint is complete if all its parts exist; any other is ignored. `loop.json` holds the lengths of the run's files,
to which a resumed run cuts them back, and the loop's own values. Groups of rollouts among these values are in Parquet
files of their own, which are written before it. Seeds and schedules follow from the step. The place in the training
data does not, since a fork may take another number of items a step: it is stored.
"""

import asyncio
import contextlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict, TypeGuard, cast

from controller.launching.hosts import Tell, kept
from controller.launching.launcher import Launcher
from controller.processes.errors import TrainingStoppedError
from controller.runs.folder import FIRST_WEIGHTS, LOOP_FILE, RunFolder, complete_checkpoints, is_checkpoint
from controller.runs.loop_config import LoopConfig, options_of
from controller.runs.models import resolve_model
from controller.runs.recording import write_rollouts
from controller.runs.step_log import EQUAL_REWARDS, StepLog
from rl.checks import check_empty_folder
from rl.protocols import Trainer
from rl.rollouts.columns import read_groups
from rl.system.disk import read_json, to_json, write_json
from rl.types import Group

_MAX_SKIPS_IN_A_ROW = 3
_MAX_STEPS_WITHOUT_SIGNAL_IN_A_ROW = 10
_SAVE_AFTER_FAILURE_S = 120.0
POLICY = "policy"
"""The name of the trainer whose model a run exports, and of its folder in a checkpoint."""
_ADVICE = (
    " A larger group_size or more prompts_per_step finds differences that are rare; an environment that is always or "
    "never solved needs other problems."
)


class SavedLoop(TypedDict):
    """The contents of a checkpoint's `loop.json`."""

    step: int
    trainers: list[str]
    lengths: dict[str, int]
    """The lengths of the run's files at the end of the step."""
    groups: list[str]
    """Those of the loop's values that are groups, each in a file of its own."""
    values: dict[str, object]
    """The loop's other values."""
    position: int
    """The number of the training item that is taken next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FinishedStep:
    """What a checkpoint of a step holds in addition to the trainers' state."""

    step: int
    lengths: dict[str, int]
    """The lengths of the run's files at its end."""
    values: Mapping[str, object]
    position: int


@dataclass(slots=True, kw_only=True)
class DataPosition:
    """How far a run has come in its endless stream of training items."""

    next: int = 0
    """The number of the item that is taken next."""
    step: int = 0
    """The step under way, or the last one before it."""
    taken: int = 0
    """Items that this step has taken."""

    def begin(self, step: int) -> None:
        """Begins a step."""
        self.step, self.taken = step, 0

    def take(self, count: int) -> int:
        """The number of the first of the next `count` items."""
        start = self.next
        self.next, self.taken = start + count, self.taken + count
        return start

    def start_of(self, step: int, count: int) -> int:
        """The number of the first item of the step under way or of a later one, if they all take `count` items.

        That of an earlier one is right if it took as many; it is at least 0.
        """
        begun = self.next - self.taken
        return max(begun + (step - self.step - (self.taken == 0)) * count, 0)


def restored_position(folder: RunFolder) -> DataPosition:
    """Where a resumed run continues; the start of the data in a new one."""
    if not folder.resumed or not (complete := folder.complete_checkpoints()):
        return DataPosition()
    loop = loop_of(complete[-1])
    return DataPosition(next=loop["position"], step=loop["step"])


def loop_of(checkpoint: Path) -> SavedLoop:
    """A checkpoint's first file. Raises ValueError for a checkpoint of an earlier version, which lacks its place."""
    loop = read_json(checkpoint / LOOP_FILE)
    if "position" not in loop:
        raise ValueError(
            f"{checkpoint} lacks its place in the data: an earlier version of ownloop wrote it; continue it with that"
        )
    return cast("SavedLoop", loop)


class Checkpoints:
    """One run's checkpoints. Each holds the state of all trainers.

    checkpoints = Checkpoints(step_log, config, DataPosition(), policy=trainer)
    for step in range(await checkpoints.resume(), config.num_steps + 1):
        ...
        await checkpoints.after_step(step)
    """

    def __init__(self, step_log: StepLog, config: LoopConfig, data: DataPosition, **trainers: Trainer) -> None:
        """Saves every `checkpoint_every` steps and keeps the newest `keep_checkpoints`. Stores where `data` is.

        The oldest checkpoint is deleted before a new one is written, but never the only one.
        """
        self._log = step_log
        self._data = data
        self.folder = step_log.folder
        self._every = config.checkpoint_every
        self._keep = config.keep_checkpoints
        self._trainers = trainers
        self._finished: _FinishedStep | None = None
        self._versions: list[int] | None = None
        """The trainers' policy versions when that step finished."""
        self.last_step = 0
        """The last finished step, in this process or before the run was resumed."""
        self.values: Mapping[str, object] = {}
        """The values that the loop gave to `after_step` with the checkpoint that `resume` restored."""

    async def resume(self) -> int:
        """Returns the first step to do: 1 in a new run, the step after the newest checkpoint in a resumed one.

        Restores the trainers and drops the rows of later steps from the run's files. Raises ValueError for a checkpoint
        of another model or of other trainers.
        """
        if not self.folder.resumed:
            return await self._begin()
        complete = self.folder.complete_checkpoints()
        if not complete:
            self.folder.cut_back({})  # what a crash left before its first checkpoint
            self._log.resume()
            self._log.phase("there is no checkpoint yet: starting again from step 1")
            return await self._begin()
        path = complete[-1]
        loop = self._loop_of(path)
        self._log.phase(f"going on after step {loop['step']}")
        await asyncio.gather(*(trainer.load_checkpoint(path / name) for name, trainer in self._trainers.items()))
        if moved := self.folder.cut_back(loop["lengths"]):
            self._log.phase(f"what was recorded after it is kept in {moved}")
        self._log.resume()
        self._end_if_solved(loop["step"])
        # A run that was ended because of these counts may try as often again.
        self._log.skipped_in_a_row %= _MAX_SKIPS_IN_A_ROW
        self._log.without_signal_in_a_row %= _MAX_STEPS_WITHOUT_SIGNAL_IN_A_ROW
        self._prune(self._keep)
        groups = {name: read_groups(path / f"{name}.parquet") for name in loop["groups"]}
        self.values, self.last_step = {**loop["values"], **groups}, loop["step"]
        return self.last_step + 1

    async def _begin(self) -> int:
        """Returns 1. Restores the weights that the run was forked with, if it was forked with weights alone."""
        path = self.folder.path / FIRST_WEIGHTS
        if path.is_dir():
            self._log.phase(f"beginning with the weights of step {self._loop_of(path)['step']} of another run")
            loads = (each.load_checkpoint(path / name, weights_only=True) for name, each in self._trainers.items())
            await asyncio.gather(*loads)
        return 1

    def _loop_of(self, path: Path) -> SavedLoop:
        """A checkpoint's first file. Raises ValueError for a checkpoint of other trainers."""
        loop = loop_of(path)
        if set(loop["trainers"]) != set(self._trainers):
            ours, theirs = (", ".join(sorted(names)) for names in (self._trainers, loop["trainers"]))
            raise ValueError(f"checkpoint {path} is of the trainers {theirs}; this loop has {ours}")
        return loop

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due after this step, unless the run must be stopped for a reason."""
        return bool(self._every) and (step == self._log.total_steps or self.solved or step % self._every == 0)

    async def after_step(self, step: int, **values: object) -> None:
        """Saves in the background if a checkpoint is due: every `checkpoint_every` steps and after the last one.

        `values` (JSON types, and lists of groups) are the loop's own. Waits while the recording is behind, and raises
        `RecordingError` if it failed, and ValueError for another value. After too many steps in a row without an update
        it saves in any case and raises `TrainingStoppedError`, unless there was nothing to learn because the problem is
        `solved`.
        """
        # Remembered before the first await: whenever the run is stopped, the files have grown by this step or not.
        lengths, position = self.folder.lengths(), self._data.next
        self._finished = _FinishedStep(step=step, lengths=lengths, values=_kept(values), position=position)
        self._versions, self.last_step = None, step
        self._versions = await self._policy_versions()
        await self.folder.room()
        self._end_if_solved(step)
        why_stop = None if self.solved else self._why_stop(step)
        if why_stop is not None or self.saves_after(step):
            await self._save(self._finished, asynchronous=why_stop is None)
        if why_stop is not None:
            raise TrainingStoppedError(f"{why_stop} The run is saved in {self.folder.checkpoint_path(step)}.")

    async def finish(self) -> None:
        """Returns once the last checkpoint is on disk. Raises the error of its save, if it failed."""
        await self._wait_for_saves()
        if self._every:
            self._prune(self._keep)

    async def save_last_step(self) -> None:
        """Saves the last finished step, if the trainers still have its parameters, and says what came of it.

        For a run that is being stopped. The unfinished step after it may have added to the gradient, which a checkpoint
        does not hold. Raises nothing: the run ends anyway.
        """
        finished = self._finished
        if finished is None:
            return  # this process has finished no step
        if not self._every:
            self._say(f"step {finished.step} is not saved: checkpoint_every is 0")
            return
        self.folder.saving = True
        self._say(f"saving step {finished.step}; Ctrl-C again to stop at once")
        try:
            why_not = await self._save_unless_changed(finished)
        except Exception as error:  # a trainer that died, a full disk
            why_not = f"{type(error).__name__}: {error}"
        finally:
            self.folder.saving = False
        self._say(f"saved step {finished.step}" if why_not is None else f"step {finished.step} is not saved: {why_not}")

    async def save_after_failure(self) -> None:
        """Saves the last finished step if an error of the loop or of a process has left the trainers whole.

        The run then repeats one step only. Raises nothing, and says nothing where a trainer is what failed.
        """
        finished = self._finished
        if finished is None or not self._every:
            return
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_SAVE_AFTER_FAILURE_S):
                if await self._save_unless_changed(finished) is None:
                    self._say(f"saved step {finished.step}")

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a run that was stopped by SIGHUP has no terminal
            self._log.note(text)

    async def _save_unless_changed(self, finished: _FinishedStep) -> str | None:
        """Saves a step unless it is saved already. Returns why that is too late, if it is."""
        if self._versions not in (None, await self._policy_versions()):
            return f"step {finished.step + 1} had already changed the parameters"
        await self._wait_for_saves()  # a save in progress may be of this very step
        if self.folder.checkpoint_path(finished.step) not in self.folder.complete_checkpoints():
            await self._save(finished, asynchronous=False)
        return None

    async def _policy_versions(self) -> list[int]:
        return await asyncio.gather(*(trainer.policy_version() for trainer in self._trainers.values()))

    async def _wait_for_saves(self) -> None:
        await asyncio.gather(*(trainer.wait_for_checkpoint() for trainer in self._trainers.values()))

    async def _save(self, finished: _FinishedStep, *, asynchronous: bool) -> None:
        await self._wait_for_saves()  # the checkpoint before this one must be complete before an older one is deleted
        self._prune(max(self._keep - 1, 1))
        path = self.folder.checkpoint_path(finished.step)
        path.mkdir(parents=True, exist_ok=True)
        await self._write_loop_file(path, finished)
        saves = (
            trainer.save_checkpoint(path / name, asynchronous=asynchronous) for name, trainer in self._trainers.items()
        )
        await asyncio.gather(*saves)
        if not asynchronous:
            self._prune(self._keep)

    async def _write_loop_file(self, path: Path, finished: _FinishedStep) -> None:
        """Writes `loop.json` once everything is on disk that it speaks of, without blocking the event loop."""
        groups = {name: value for name, value in finished.values.items() if _are_groups(value)}
        for name, value in groups.items():
            self.folder.in_background(partial(write_rollouts, path / f"{name}.parquet", value))
        await self.folder.sync()  # `loop.json` promises these files
        loop = SavedLoop(
            step=finished.step,
            trainers=[*self._trainers],
            lengths=finished.lengths,
            groups=[*groups],
            values={name: value for name, value in finished.values.items() if name not in groups},
            position=finished.position,
        )
        write_json(path / LOOP_FILE, loop)

    def _prune(self, keep: int) -> None:
        """Deletes all but the newest `keep` complete checkpoints, and the remains of incomplete ones."""
        kept = self.folder.complete_checkpoints()[-keep:]
        for path in self.folder.checkpoints.iterdir() if self.folder.checkpoints.is_dir() else ():
            if path not in kept and is_checkpoint(path):
                hidden = path if path.name.startswith(".") else path.rename(path.with_name(f".{path.name}"))
                shutil.rmtree(hidden)  # hidden first, so that a half-deleted one never looks complete

    @property
    def solved(self) -> bool:
        """Whether the run is over because its policy gets the best reward for every problem."""
        return self._log.solved_at is not None

    def _end_if_solved(self, step: int) -> None:
        if self._log.solved_in_a_row >= _MAX_STEPS_WITHOUT_SIGNAL_IN_A_ROW:
            self._log.solved_at = step
            self._log.note(
                f"solved at step {step}: every reward of the last {_MAX_STEPS_WITHOUT_SIGNAL_IN_A_ROW} steps was "
                f"{self._log.best_reward:g}, the best there is"
            )

    def _why_stop(self, step: int) -> str | None:
        """Why the run is to be ended after this step, as a sentence; None if it continues."""
        if self._log.skipped_in_a_row >= _MAX_SKIPS_IN_A_ROW:
            return (
                f"The gradient was not finite {_MAX_SKIPS_IN_A_ROW} steps in a row, up to step {step}; the parameters "
                "are as they were before such an update. A lower learning rate or a smaller grad_clip_norm may help."
            )
        if self._log.without_signal_in_a_row >= _MAX_STEPS_WITHOUT_SIGNAL_IN_A_ROW:
            why = self._log.why_without_signal
            return (
                f"{_MAX_STEPS_WITHOUT_SIGNAL_IN_A_ROW} steps in a row, up to step {step}, had nothing to learn from: "
                f"{why}.{_ADVICE if why == EQUAL_REWARDS else ''}"
            )
        return None


def _are_groups(value: object) -> TypeGuard[list[Group]]:
    """Whether a loop's value is a list of groups, which a checkpoint holds as a file of rollouts."""
    return isinstance(value, list) and bool(value) and all(isinstance(g, Group) for g in cast("list[object]", value))


def _kept(values: Mapping[str, object]) -> dict[str, object]:
    """Copies of a loop's values, which may change in the next step. Raises ValueError for what JSON would change."""
    kept: dict[str, object] = {}
    for name, value in values.items():
        with contextlib.suppress(TypeError, ValueError):  # of a comparison, too
            kept[name] = list(value) if _are_groups(value) else json.loads(json.dumps(to_json(value)))
            if kept[name] == value:
                continue
        raise ValueError(
            f"Run.keep: {name} is {value!r:.80}; it must be of JSON types (finite numbers, texts, lists and "
            "dicts whose keys are texts), or a list of groups"
        )
    return kept


def checkpoint_of(run: Path, step: int | None) -> Path:
    """The checkpoint of a step, or the newest. Raises ValueError, naming the steps that have one, if there is none."""
    complete = {read_json(path / LOOP_FILE)["step"]: path for path in complete_checkpoints(run / "checkpoints")}
    if not complete:
        raise ValueError(f"{run} has no complete checkpoint")
    if step is None:
        return complete[max(complete)]
    if step not in complete:
        raise ValueError(f"{run} has no checkpoint of step {step}; it has steps {', '.join(map(str, complete))}")
    return complete[step]


async def export_checkpoint(
    config: LoopConfig, checkpoint: Path, directory: Path, log_dir: Path, tell: Tell, *, alone: bool = False
) -> None:
    """Writes the policy of a checkpoint to `directory`; of an adapter the merged model, or with `alone` that alone.

    `config` is the configuration of its run. Starts the run's trainer, on its hosts if it has some, which loads the
    checkpoint. Raises ValueError if `directory` holds something, and for a checkpoint without a policy.
    """
    check_empty_folder(directory)
    if not (checkpoint / POLICY).is_dir():
        raise ValueError(f"{checkpoint} holds no {POLICY!r}, the trainer whose model is exported")
    model = resolve_model(config.model, tell)
    hosts = options_of(config).hosts
    async with kept(hosts, tell), Launcher(log_dir, hosts) as launcher:
        # With its generator's configuration the trainer exports in that dtype, as at the run's end.
        trainer = await launcher.trainer(model, config.policy_config, generator=options_of(config).generator_config)
        await trainer.load_checkpoint(checkpoint / POLICY)
        await (trainer.export_peft if alone else trainer.export_hf)(directory)
