"""Groups that a loop still holds are in its checkpoint, as rollouts, whole or not at all."""

import asyncio
import io
import json
from pathlib import Path
from typing import cast

import pyarrow.parquet as pq
import pytest

from controller.runs.checkpoints import Checkpoints, DataPosition
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.loop_config import LoopConfig
from controller.runs.step_log import StepLog
from rl.protocols import Trainer
from rl.system.disk import RecordingError
from rl.types import Group
from tests.controller.runs.test_checkpoints import FileTrainer
from tests.rl.fakes import completion, single_turn
from tests.rl.recordings import disk_of
from trainer.config import TrainerConfig

CONFIG = LoopConfig(
    model="", trainer=TrainerConfig(), num_steps=4, learning_rate=0.0, checkpoint_every=1, keep_checkpoints=2
)


def _groups(step: int, text: str = "ab") -> list[Group]:
    """Two groups with numbers of this step."""
    sampled = completion(text, version=step)
    rollout = single_turn((1, 2), sampled, reward=0.1 * step, metrics={"tries": float(step)})
    return [Group(problem_id=f"p{i}", prompt="q", rollouts=(rollout,) * 2, failures=("hung",)) for i in range(2)]


def _checkpoints(path: Path, *, resume: bool = False) -> tuple[Checkpoints, RunFolder, FileTrainer]:
    folder, trainer = RunFolder(path, CONFIG, resume=resume), FileTrainer()
    step_log = StepLog(folder, Console(io.StringIO()), CONFIG.num_steps)
    return Checkpoints(step_log, CONFIG, DataPosition(), policy=cast(Trainer, trainer)), folder, trainer


def test_groups_that_wait_are_in_the_checkpoint(tmp_path: Path) -> None:
    checkpoints, folder, _ = _checkpoints(tmp_path / "a")

    async def train() -> None:
        for step in range(1, 5):
            folder.log_metrics({"step": float(step)})
            folder.log_rollouts(step, _groups(step))
            await checkpoints.after_step(step, waiting=_groups(step), empty=[], numbers=[step])
        await checkpoints.finish()

    asyncio.run(train())
    path = folder.checkpoint_path(4)
    assert pq.read_table(path / "waiting.parquet").column("problem_id").to_pylist() == ["p0", "p0", "p1", "p1"]
    loop = json.loads((path / "loop.json").read_text())
    assert (loop["groups"], loop["values"]) == (["waiting"], {"empty": [], "numbers": [4]})
    assert loop["lengths"]["rollouts/step"] == 4
    folder.log_rollouts(5, _groups(5))
    folder.close()

    checkpoints, folder, _ = _checkpoints(tmp_path / "a", resume=True)
    assert asyncio.run(checkpoints.resume()) == 5
    assert checkpoints.values == {"waiting": _groups(4), "empty": [], "numbers": [4]}
    steps = [file.name for file in sorted(folder.rollouts.iterdir())]
    assert steps == [f"step-{step:05d}.parquet" for step in range(1, 5)]


def test_a_checkpoint_that_the_disk_has_no_room_for_is_none(tmp_path: Path) -> None:
    checkpoints, folder, trainer = _checkpoints(tmp_path / "a")
    folder.log_rollouts(1, _groups(1))
    asyncio.run(checkpoints.after_step(1, waiting=_groups(1)))
    asyncio.run(trainer.wait_for_checkpoint())
    many_words = "".join(map(chr, range(100, 30_000)))
    with (
        disk_of(20_000),
        pytest.raises(RecordingError, match=r"step-00002/waiting\.parquet cannot be written: File too large"),
    ):
        asyncio.run(checkpoints.after_step(2, waiting=_groups(2, many_words)))
    assert [path.name for path in folder.complete_checkpoints()] == ["step-00001"]
    assert list(folder.checkpoint_path(2).iterdir()) == []
    with pytest.raises(RecordingError):  # the loop cannot go on as if nothing had happened
        asyncio.run(checkpoints.after_step(3))
    with pytest.raises(RecordingError):
        folder.close()

    checkpoints, *_ = _checkpoints(tmp_path / "a", resume=True)
    assert asyncio.run(checkpoints.resume()) == 2
    assert checkpoints.values == {"waiting": _groups(1)}
