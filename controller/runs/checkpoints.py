"""Checkpoints: everything a run needs to go on after any end, saved every few steps.

A checkpoint is one directory, `checkpoints/step-00010`. It holds `loop.json` and a directory per trainer, under the
trainer's name. `loop.json` is written first, and a trainer's directory appears only when it is complete. So a
checkpoint is complete if all its parts exist; any other is ignored. `loop.json` holds the lengths of the run's files,
to which a resumed run cuts them back, and the loop's own values. Data order, seeds and schedules follow from the step.
"""

import asyncio
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from controller.meshes.errors import TrainingStoppedError
from controller.runs.loop_config import LoopConfig
from controller.runs.report import EQUAL_REWARDS, Report
from rl.protocols import Trainer
from rl.runs.folder import LOOP_FILE, write_json

_MAX_SKIPS_IN_A_ROW = 3
_MAX_STEPS_WITHOUT_SIGNAL_IN_A_ROW = 10
_ADVICE = (
    " A larger group_size or more prompts_per_step finds differences that are rare; an environment that is always or "
    "never solved needs other problems."
)


class Checkpoints:
    """One run's checkpoints. Each holds the state of all trainers.

    checkpoints = Checkpoints(report, config, policy=trainer)
    for step in range(await checkpoints.resume(), config.num_steps + 1):
        ...
        await checkpoints.after_step(step)
    """

    def __init__(self, report: Report, config: LoopConfig, **trainers: Trainer) -> None:
        """Saves every `checkpoint_every` steps and keeps the newest `keep_checkpoints`.

        The oldest checkpoint is deleted before a new one is written, but never the only one.
        """
        self._report = report
        self._folder = report.folder
        self._every = config.checkpoint_every
        self._keep = config.keep_checkpoints
        self._trainers = trainers
        self.values: Mapping[str, Any] = {}
        """The values that the loop gave to `after_step` with the checkpoint that `resume` restored; JSON types."""

    async def resume(self) -> int:
        """Returns the first step to do: 1 in a new run, the step after the newest checkpoint in a resumed one.

        Restores the trainers and drops the rows of later steps from the run's files. Raises ValueError for a checkpoint
        of another model or of other trainers.
        """
        if not self._folder.resumed:
            return 1
        complete = self._folder.complete_checkpoints()
        if not complete:
            self._folder.cut_back({})
            self._report.phase("there is no checkpoint yet: starting again from step 1")
            return 1
        path = complete[-1]
        loop: dict[str, Any] = json.loads((path / LOOP_FILE).read_text(encoding="utf-8"))
        if set(loop["trainers"]) != set(self._trainers):
            ours, theirs = (", ".join(sorted(names)) for names in (self._trainers, loop["trainers"]))
            raise ValueError(f"checkpoint {path} is of the trainers {theirs}; this loop has {ours}")
        self._report.phase(f"going on after step {loop['step']}")
        await asyncio.gather(*(trainer.load_checkpoint(path / name) for name, trainer in self._trainers.items()))
        self._folder.cut_back(loop["lengths"])
        self._report.resume()
        # A run that was ended because of these counts may try as often again.
        self._report.skipped_in_a_row %= _MAX_SKIPS_IN_A_ROW
        self._report.without_signal_in_a_row %= _MAX_STEPS_WITHOUT_SIGNAL_IN_A_ROW
        self._prune(self._keep)
        self.values = loop["values"]
        return loop["step"] + 1

    async def after_step(self, step: int, **values: Any) -> None:
        """Saves if a checkpoint is due, in the background except after the last step.

        `values` (JSON types) are the loop's own. After too many steps in a row without an update it saves in any case
        and raises `TrainingStoppedError`.
        """
        why_stop = self._why_stop(step)
        last = step == self._report.total_steps or why_stop is not None
        if why_stop is not None or (self._every and (last or step % self._every == 0)):
            await self._save(step, values, asynchronous=not last)
        if why_stop is not None:
            raise TrainingStoppedError(f"{why_stop} The run is saved in {self._folder.checkpoint_path(step)}.")

    async def _save(self, step: int, values: Mapping[str, Any], *, asynchronous: bool) -> None:
        # The checkpoint before this one must be complete before an older one is deleted.
        await asyncio.gather(*(trainer.wait_for_checkpoint() for trainer in self._trainers.values()))
        self._prune(max(self._keep - 1, 1))
        path = self._folder.checkpoint_path(step)
        path.mkdir(parents=True, exist_ok=True)
        lengths = self._folder.lengths()
        write_json(
            path / LOOP_FILE, {"step": step, "trainers": [*self._trainers], "lengths": lengths, "values": values}
        )
        saves = (
            trainer.save_checkpoint(path / name, asynchronous=asynchronous) for name, trainer in self._trainers.items()
        )
        await asyncio.gather(*saves)
        if not asynchronous:
            self._prune(self._keep)

    def _prune(self, keep: int) -> None:
        """Deletes all but the newest `keep` complete checkpoints, and the remains of incomplete ones."""
        kept = self._folder.complete_checkpoints()[-keep:]
        for path in self._folder.checkpoints.iterdir() if self._folder.checkpoints.is_dir() else ():
            if path not in kept and _is_checkpoint(path):
                hidden = path if path.name.startswith(".") else path.rename(path.with_name(f".{path.name}"))
                shutil.rmtree(hidden)  # hidden first, so that a half-deleted one never looks complete

    def _why_stop(self, step: int) -> str | None:
        """Why the run is to be ended after this step, as a sentence; None if it goes on."""
        if self._report.skipped_in_a_row >= _MAX_SKIPS_IN_A_ROW:
            return (
                f"The gradient was not finite {_MAX_SKIPS_IN_A_ROW} steps in a row, up to step {step}; the parameters "
                "are as they were before. A lower learning rate or a smaller grad_clip_norm may help."
            )
        if self._report.without_signal_in_a_row >= _MAX_STEPS_WITHOUT_SIGNAL_IN_A_ROW:
            why = self._report.why_without_signal
            return (
                f"{_MAX_STEPS_WITHOUT_SIGNAL_IN_A_ROW} steps in a row, up to step {step}, had nothing to learn from: "
                f"{why}.{_ADVICE if why == EQUAL_REWARDS else ''}"
            )
        return None


def _is_checkpoint(path: Path) -> bool:
    """Whether a path was made by `Checkpoints`, hidden or not."""
    return path.is_dir() and path.name.lstrip(".").startswith("step-")
