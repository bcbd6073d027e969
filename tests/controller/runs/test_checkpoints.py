import asyncio
import gc
import io
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from controller.processes.errors import TrainingStoppedError
from controller.runs.checkpoints import Checkpoints, DataPosition
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.loop_config import LoopConfig
from controller.runs.step_log import EQUAL_REWARDS, StepLog
from rl.algorithms.metrics import PhaseClock
from rl.protocols import Trainer
from rl.types import Datum, ForwardBackwardOutput, OptimStepOutput
from trainer.config import TrainerConfig


class FileTrainer:
    """Saves its only parameter; a background save ends when it is waited for, as late as it may."""

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self._pending: tuple[Path, int] | None = None

    async def policy_version(self) -> int:
        return self.value

    async def save_checkpoint(self, path: Path, *, asynchronous: bool = False) -> None:
        await self.wait_for_checkpoint()
        self._pending = (path, self.value)
        if not asynchronous:
            await self.wait_for_checkpoint()

    async def wait_for_checkpoint(self) -> None:
        if self._pending is not None:
            (path, value), self._pending = self._pending, None
            path.mkdir()
            (path / "value").write_text(str(value))

    async def load_checkpoint(self, path: Path) -> int:
        self.value = int((path / "value").read_text())
        return self.value


def _checkpoints(
    path: Path, *, resume: bool, every: int = 2, keep: int = 2, total: int = 9, **trainers: FileTrainer
) -> tuple[Checkpoints, StepLog, io.StringIO]:
    stream = io.StringIO()
    step_log = StepLog(RunFolder(path, {}, resume=resume), Console(stream), total)
    config = LoopConfig(
        model="",
        trainer=TrainerConfig(),
        num_steps=total,
        learning_rate=0.0,
        checkpoint_every=every,
        keep_checkpoints=keep,
    )
    return Checkpoints(step_log, config, DataPosition(), **cast(dict[str, Trainer], trainers)), step_log, stream


async def _train(checkpoints: Checkpoints, folder: RunFolder, trainer: FileTrainer, steps: range) -> None:
    for step in steps:
        trainer.value = step
        folder.log_metrics({"step": float(step)})
        await checkpoints.after_step(step, rate=step / 10)


def _names(folder: RunFolder) -> list[str]:
    return [path.name for path in folder.complete_checkpoints()]


def test_a_run_goes_on_behind_its_last_complete_checkpoint(tmp_path: Path) -> None:
    trainer = FileTrainer()
    checkpoints, step_log, _ = _checkpoints(tmp_path / "a", resume=False, policy=trainer)

    assert asyncio.run(checkpoints.resume()) == 1
    asyncio.run(_train(checkpoints, step_log.folder, trainer, range(1, 6)))
    assert _names(step_log.folder) == ["step-00002"]  # that of step 4 is still being written when the process dies
    del checkpoints, step_log

    resumed = FileTrainer()
    checkpoints, step_log, stream = _checkpoints(tmp_path / "a", resume=True, policy=resumed)
    assert asyncio.run(checkpoints.resume()) == 3
    assert resumed.value == 2
    assert checkpoints.values == {"rate": 0.2}
    assert [row["step"] for row in step_log.folder.metrics()] == [1, 2]
    assert "going on after step 2" in stream.getvalue()
    assert [path.name for path in step_log.folder.checkpoints.iterdir()] == ["step-00002"]

    asyncio.run(_train(checkpoints, step_log.folder, resumed, range(3, 10)))
    assert [row["step"] for row in step_log.folder.metrics()] == list(range(1, 10))
    asyncio.run(checkpoints.finish())
    assert _names(step_log.folder) == ["step-00008", "step-00009"]  # the last step's is saved whatever its number


def test_a_checkpoint_is_whole_only_with_all_its_trainers(tmp_path: Path) -> None:
    policy, critic = FileTrainer(), FileTrainer()
    checkpoints, step_log, _ = _checkpoints(tmp_path / "a", resume=False, policy=policy, critic=critic)

    asyncio.run(_train(checkpoints, step_log.folder, policy, range(1, 5)))
    asyncio.run(policy.wait_for_checkpoint())
    assert _names(step_log.folder) == ["step-00002"]
    asyncio.run(critic.wait_for_checkpoint())
    assert _names(step_log.folder) == ["step-00002", "step-00004"]
    del checkpoints, step_log
    checkpoints, _, _ = _checkpoints(tmp_path / "a", resume=True, policy=policy)
    with pytest.raises(ValueError, match="is of the trainers critic, policy; this loop has policy"):
        asyncio.run(checkpoints.resume())


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_there_is_always_a_checkpoint_and_never_too_many(keep: int, tmp_path: Path) -> None:
    trainer = FileTrainer()
    checkpoints, step_log, _ = _checkpoints(tmp_path / "a", resume=False, every=1, keep=keep, policy=trainer)

    async def watched() -> None:
        for step in range(1, 9):
            await _train(checkpoints, step_log.folder, trainer, range(step, step + 1))
            present = [path for path in step_log.folder.checkpoints.iterdir() if path.is_dir()]
            assert len(present) <= max(keep, 2)
            assert step == 1 or step_log.folder.complete_checkpoints()

    asyncio.run(watched())
    asyncio.run(_train(checkpoints, step_log.folder, trainer, range(9, 10)))
    asyncio.run(checkpoints.finish())
    assert len(_names(step_log.folder)) == keep


def test_without_a_checkpoint_a_run_begins_again_and_says_so(tmp_path: Path) -> None:
    _, step_log, _ = _checkpoints(tmp_path / "a", resume=False, policy=FileTrainer())
    step_log.folder.log_metrics({"step": 1.0})
    del step_log
    checkpoints, step_log, stream = _checkpoints(tmp_path / "a", resume=True, policy=FileTrainer())
    assert asyncio.run(checkpoints.resume()) == 1
    assert "no checkpoint yet: starting again from step 1" in stream.getvalue()
    assert step_log.folder.metrics() == []


def test_none_are_saved_unless_asked_for(tmp_path: Path) -> None:
    trainer = FileTrainer()
    checkpoints, step_log, _ = _checkpoints(tmp_path / "a", resume=False, every=0, policy=trainer)
    asyncio.run(_train(checkpoints, step_log.folder, trainer, range(1, 10)))
    assert not step_log.folder.checkpoints.exists()


def test_a_file_that_was_shortened_is_refused(tmp_path: Path) -> None:
    trainer = FileTrainer()
    checkpoints, step_log, _ = _checkpoints(tmp_path / "a", resume=False, total=2, policy=trainer)
    asyncio.run(_train(checkpoints, step_log.folder, trainer, range(1, 3)))
    asyncio.run(checkpoints.finish())
    step_log.folder.metrics_file.write_text('{"step": 1}\n')
    del checkpoints, step_log
    checkpoints, _, _ = _checkpoints(tmp_path / "a", resume=True, policy=trainer)
    with pytest.raises(ValueError, match=r"metrics\.jsonl has 12 bytes; it had \d+ when the last checkpoint"):
        asyncio.run(checkpoints.resume())


@pytest.mark.parametrize(
    ("counter", "limit", "message"),
    [
        ("skipped_in_a_row", 3, "not finite 3 steps in a row, up to step 5"),
        ("without_signal_in_a_row", 10, "10 steps in a row, up to step 5, had nothing to learn from"),
    ],
)
def test_a_run_that_gets_nowhere_is_saved_and_ended(counter: str, limit: int, message: str, tmp_path: Path) -> None:
    trainer = FileTrainer(value=7)
    checkpoints, step_log, _ = _checkpoints(tmp_path / "a", resume=False, every=0, policy=trainer)
    setattr(step_log, counter, limit - 1)
    asyncio.run(checkpoints.after_step(4))
    assert not step_log.folder.checkpoints.exists()
    setattr(step_log, counter, limit)
    with pytest.raises(TrainingStoppedError, match=message):
        asyncio.run(checkpoints.after_step(5))
    assert (tmp_path / "a" / "checkpoints" / "step-00005" / "policy" / "value").read_text() == "7"
    loop: dict[str, Any] = json.loads((tmp_path / "a" / "checkpoints" / "step-00005" / "loop.json").read_text())
    assert loop["step"] == 5


def test_why_nothing_was_learned_decides_what_is_advised(tmp_path: Path) -> None:
    for name, why, told in (
        ("groups", EQUAL_REWARDS, "in every group all rewards were equal. A larger group_size"),
        (
            "texts",
            "every example was longer than max_tokens",
            r"every example was longer than max_tokens\. The",
        ),
    ):
        checkpoints, step_log, _ = _checkpoints(tmp_path / name, resume=False, every=0, policy=FileTrainer())
        for step in range(1, 11):
            step_log.step_without_signal(step, PhaseClock(), why=why)
        with pytest.raises(TrainingStoppedError, match=told):
            asyncio.run(checkpoints.after_step(10))


def test_steps_without_signal_are_counted_in_a_row(tmp_path: Path) -> None:
    _, step_log, stream = _checkpoints(tmp_path / "a", resume=False, policy=FileTrainer())
    for step in (1, 2):
        step_log.step_without_signal(step, PhaseClock(), [])
    assert step_log.without_signal_in_a_row == 2
    assert "step 2 made no update" in stream.getvalue()


def _step(step_log: StepLog, step: int, *, skipped: bool) -> None:
    clock = PhaseClock()
    with clock("optim_step"):
        tokens = np.array([1])
    batch = [Datum(tokens=tokens, loss_inputs={"target_tokens": tokens})]
    output = ForwardBackwardOutput(logprobs=(), entropy=None, metrics={"loss": 1.0, "num_loss_tokens": 1.0})
    update = OptimStepOutput(grad_norm=1.0, learning_rate=0.1, policy_version=step, skipped=skipped)
    step_log.step(step, clock, (), batch, output, [update])


def test_what_is_counted_in_a_row_goes_on_with_the_run(tmp_path: Path) -> None:
    """Killed after two skipped steps and seven without signal, a run is ended by three more of those."""
    checkpoints, step_log, _ = _checkpoints(tmp_path / "a", resume=False, every=10, total=99, policy=FileTrainer())
    _step(step_log, 1, skipped=False)
    _step(step_log, 2, skipped=True)
    _step(step_log, 3, skipped=True)
    for step in range(4, 11):
        step_log.step_without_signal(step, PhaseClock())
    step_log.folder.log_metrics({"step": 10.0, "eval_reward": 0.5})
    asyncio.run(checkpoints.after_step(10))
    step_log.step_without_signal(11, PhaseClock())  # later than the checkpoint: the resumed run does it again
    asyncio.run(checkpoints.after_step(20))  # makes that checkpoint whole
    del checkpoints, step_log

    checkpoints, step_log, _ = _checkpoints(tmp_path / "a", resume=True, every=10, total=99, policy=FileTrainer())
    assert asyncio.run(checkpoints.resume()) == 11
    assert (step_log.skipped_in_a_row, step_log.without_signal_in_a_row) == (2, 7)
    for step in (11, 12):
        step_log.step_without_signal(step, PhaseClock())
        asyncio.run(checkpoints.after_step(step))
    step_log.step_without_signal(13, PhaseClock())
    with pytest.raises(TrainingStoppedError, match="10 steps in a row, up to step 13"):
        asyncio.run(checkpoints.after_step(13))
    del checkpoints, step_log
    gc.collect()  # the error's traceback knows the folder, which only one run may have

    checkpoints, step_log, _ = _checkpoints(tmp_path / "a", resume=True, every=0, total=99, policy=FileTrainer())
    assert asyncio.run(checkpoints.resume()) == 14
    assert (step_log.skipped_in_a_row, step_log.without_signal_in_a_row) == (2, 0)  # ten more before it ends again


@pytest.mark.parametrize(("every", "keep", "name"), [(-1, 2, "checkpoint_every"), (1, 0, "keep_checkpoints")])
def test_numbers_that_make_no_sense(every: int, keep: int, name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=name):
        _checkpoints(tmp_path / "a", resume=False, every=every, keep=keep, policy=FileTrainer())
