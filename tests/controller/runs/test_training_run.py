"""`Run`, the one object that a loop's page talks to, with a trainer that only saves and loads.

Covers: controller/runs/training_run.py, controller/runs/__init__.py
"""

import asyncio
import io
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from controller.runs import Console, LoopConfig, Run, RunFolder
from rl.protocols import Trainer
from rl.rollouts.evaluation import Evaluation, Measurement
from rl.types import Datum, ForwardBackwardOutput, OptimStepOutput
from tests.controller.runs.test_checkpoints import FileTrainer
from trainer.config import TrainerConfig

CONFIG = LoopConfig(
    model="", trainer=TrainerConfig(), num_steps=4, learning_rate=0.0, checkpoint_every=2, keep_checkpoints=1
)


def end_step(run: Run, step: int, **metrics: float) -> None:
    """Records a step that learned from one token."""
    tokens = np.array([1])
    batch = [Datum(tokens=tokens, loss_inputs={"target_tokens": tokens})]
    output = ForwardBackwardOutput(logprobs=(), entropy=None, metrics={"loss": 1.0, "num_loss_tokens": 1.0})
    update = OptimStepOutput(grad_norm=1.0, learning_rate=0.1, policy_version=step, skipped=False)
    run.end_step((), batch, output, update, metrics)


async def _loop(run: Run, trainer: FileTrainer, last: int) -> None:
    """What a page does, up to step `last`."""
    async with run.steps(policy=cast(Trainer, trainer)) as steps:
        total: int = run.restored.get("total", 0)
        for step in steps:
            if step > last:
                break
            clock = run.begin_step(step)
            with clock("optim_step"):
                total += step
            trainer.value = total
            end_step(run, step, total=total)
            await run.checkpoint_if_due(total=total)


def test_a_loop_goes_on_with_its_trainers_and_its_own_values(tmp_path: Path) -> None:
    begun = RunFolder(tmp_path / "a", CONFIG)
    asyncio.run(_loop(Run(CONFIG, begun, Console(io.StringIO())), trainer := FileTrainer(), 3))
    asyncio.run(trainer.wait_for_checkpoint())
    del begun

    folder, stream, resumed = RunFolder(tmp_path / "a", CONFIG, resume=True), io.StringIO(), FileTrainer()
    run = Run(CONFIG, folder, Console(stream))
    asyncio.run(_loop(run, resumed, CONFIG.num_steps))
    rows = folder.metrics()
    assert [(row["step"], row["total"], row["policy_version"]) for row in rows] == [
        (1, 1, 1),
        (2, 3, 2),
        (3, 6, 3),
        (4, 10, 4),
    ]
    assert all(row["seconds_step"] >= row["seconds_optim_step"] for row in rows)
    assert resumed.value == 10
    assert [path.name for path in folder.complete_checkpoints()] == ["step-00004"]
    run.finish()
    assert stream.getvalue().splitlines()[0].endswith("going on after step 2")


def test_evaluations_are_of_the_steps_before_them(tmp_path: Path) -> None:
    folder, stream = RunFolder(tmp_path / "a", CONFIG), io.StringIO()
    run = Run(CONFIG, folder, Console(stream))
    run.log_evaluation(0, Evaluation(groups=()))  # a recording has no held-out problems
    for step, loss in ((0, 2.0), (4, 1.0)):
        run.log_measurements(step, loss=Measurement(values=np.full(3, loss)))
    run.finish()
    assert [(row["step"], row["eval_loss"]) for row in folder.metrics()] == [(0, 2), (4, 1)]
    assert "Held-out loss went from 2.000 to 1.000" in stream.getvalue()
    assert (folder.path / "loss.png").exists()


def test_the_folders_of_a_run(tmp_path: Path) -> None:
    run = Run(CONFIG, RunFolder(tmp_path / "a", CONFIG), Console(io.StringIO()))
    assert (run.log_dir, run.model_dir) == (tmp_path / "a" / "logs", tmp_path / "a" / "model")
    assert run.restored == {}


def test_a_configuration_that_names_no_loop_says_so() -> None:
    with pytest.raises(
        ValueError, match=r"LoopConfig has no method loop\(\), which returns the function to train with"
    ):
        CONFIG.loop()


def test_a_page_that_forgets_its_steps_is_told(tmp_path: Path) -> None:
    run: Any = Run(CONFIG, RunFolder(tmp_path / "a", CONFIG), Console(io.StringIO()))
    run.begin_step(1)
    with pytest.raises(AssertionError, match=r"Run\.steps names the trainers to save"):
        asyncio.run(run.checkpoint_if_due())
