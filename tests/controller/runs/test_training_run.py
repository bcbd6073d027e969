"""`Run`, the one object that a loop's page talks to, with a trainer that only saves and loads."""

import asyncio
import io
import json
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from controller.runs import Console, LoopConfig, Run, RunFolder
from controller.runs.metric_rows import is_timing
from rl.protocols import Trainer
from rl.rollouts.evaluation import Evaluation, Measurement
from rl.types import Datum, ForwardBackwardOutput, OptimStepOutput
from tests.controller.runs.test_checkpoints import FileTrainer
from tests.docs.loop_runs import run_loop
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
        async for step in steps:
            if step > last:
                break
            async with run.clock("optim_step"):
                total += step
            trainer.value = total
            end_step(run, step, total=total)
            run.keep(total=total)


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


async def test_evaluations_are_of_the_steps_before_them(tmp_path: Path) -> None:
    folder, stream = RunFolder(tmp_path / "a", CONFIG), io.StringIO()
    run = Run(CONFIG, folder, Console(stream))
    losses = iter((2.0, 1.0))

    async def evaluate() -> Evaluation:
        return Evaluation(measurements={"loss": Measurement(values=np.full(3, next(losses)))})

    async with run.steps(evaluate, policy=cast(Trainer, FileTrainer())) as steps:
        async for step in steps:
            async with run.clock("optim_step"):
                await asyncio.sleep(0)
            end_step(run, step)
    run.finish()
    assert [(row["step"], row["eval_loss"]) for row in folder.metrics() if "eval_loss" in row] == [(0, 2), (4, 1)]
    assert "Held-out loss went from 2.000 to 1.000" in stream.getvalue()


def test_the_folders_of_a_run(tmp_path: Path) -> None:
    run = Run(CONFIG, RunFolder(tmp_path / "a", CONFIG), Console(io.StringIO()))
    assert (run.log_dir, run.model_dir) == (tmp_path / "a" / "logs", tmp_path / "a" / "model")
    assert run.restored == {}


@pytest.mark.parametrize("loop", ["grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dapo", "ppo"))])
@pytest.mark.usefixtures("in_one_process")
def test_an_evaluation_beside_training_changes_no_metric(tmp_path: Path, loop: str) -> None:
    """Neither of training nor of the evaluation, whose version is that of its step."""
    runs: dict[str, list[dict[str, float]]] = {}
    for evaluation in ("between", "beside"):
        run_loop(loop, tmp_path / evaluation, evaluation=evaluation, num_steps=2, evaluate_every=1)
        text = (tmp_path / evaluation / "metrics.jsonl").read_text()
        runs[evaluation] = [json.loads(line) for line in text.splitlines()]
    assert ["seconds_evaluate" in row for row in runs["beside"] if "loss" in row] == [True] * 2
    assert [row["step"] for row in runs["beside"] if "eval_reward" in row] == [0, 1, 2]
    plain = {
        name: [{key: value for key, value in row.items() if not is_timing(key)} for row in rows]
        for name, rows in runs.items()
    }
    assert plain["beside"] == plain["between"]
    versions = {row["step"]: row["eval_version"] for row in plain["beside"] if "eval_version" in row}
    assert versions == {0: 0, **{row["step"]: row["policy_version"] for row in plain["beside"] if "loss" in row}}


@pytest.mark.parametrize("where", ["beside", "apart"])
def test_an_evaluation_is_over_before_a_save(tmp_path: Path, where: str) -> None:
    """One beside training is over before a pull, too. One apart from it may take several steps."""

    class Evaluated(LoopConfig):
        evaluation = where

    config = Evaluated(
        model="", trainer=TrainerConfig(), num_steps=4, learning_rate=0.0, evaluate_every=2, checkpoint_every=3
    )
    run, happened = Run(config, RunFolder(tmp_path / "a", config), Console(io.StringIO())), list[str]()

    async def evaluate() -> Evaluation:
        happened.append("begins")
        for _turn in range(9):  # turns of the event loop; a step takes one or two
            await asyncio.sleep(0)
        happened.append("ends")
        return Evaluation()

    class Saves(FileTrainer):
        async def save_checkpoint(self, path: Path, *, asynchronous: bool = False) -> None:
            happened.append("saved")
            await super().save_checkpoint(path, asynchronous=asynchronous)

    async def main() -> None:
        async with run.steps(evaluate, policy=cast(Trainer, Saves())) as steps:
            async for step in steps:
                async with run.clock("generate"):
                    await asyncio.sleep(0)
                    happened.append("sampled")
                if step != 4:  # which makes no update
                    async with run.clock("forward_backward"):
                        await asyncio.sleep(0)
                        happened.append("trained")
                    async with run.clock("pull"):
                        happened.append("pulled")
                    end_step(run, step)
                else:
                    run.end_step_without_update()

    asyncio.run(main())
    step, last = ["sampled", "trained", "pulled"], ["sampled", "saved", "begins", "ends"]
    if where == "beside":
        evaluated = ["sampled", "begins", "trained", "ends", "pulled"]
        assert happened == [*evaluated, *step, *evaluated, "saved", *last]
    else:
        assert happened == ["begins", *step, *step, "ends", "begins", *step, "ends", "saved", *last]
