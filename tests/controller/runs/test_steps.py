"""A run that ends in the middle of a step: stopped, as Ctrl-C does it, by cancelling its task, or by a failure."""

import asyncio
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from controller.processes.errors import MeshError
from controller.runs import Console, LoopConfig, Run, RunFolder
from rl.protocols import Trainer
from tests.controller.runs.test_checkpoints import FileTrainer
from trainer.config import TrainerConfig

CONFIG = LoopConfig(model="", trainer=TrainerConfig(), num_steps=9, learning_rate=0.0, checkpoint_every=5)


class CountingTrainer(FileTrainer):
    """Counts its saves."""

    saves = 0

    async def save_checkpoint(self, path: Path, *, asynchronous: bool = False) -> None:
        self.saves += 1
        await super().save_checkpoint(path, asynchronous=asynchronous)


class FullDisk(FileTrainer):
    """Cannot save."""

    async def save_checkpoint(self, path: Path, *, asynchronous: bool = False) -> None:
        raise OSError(28, "No space left on device")


def stopped_in(
    step: int,
    folder: RunFolder,
    trainer: FileTrainer,
    *,
    updated: bool = False,
    config: LoopConfig = CONFIG,
    failure: BaseException | None = None,
) -> str:
    """Runs a loop until the middle of a step, `updated` if its optimizer has stepped. Returns the console's lines.

    The loop is cancelled, or ended by a `failure`.
    """
    stream = io.StringIO()
    run = Run(config, folder, Console(stream))

    async def page() -> None:
        async with run.steps(policy=cast(Trainer, trainer)) as steps:
            async for number in steps:
                if number == step:
                    trainer.value += updated
                    folder.log_metrics({"step": 99.0})  # as an evaluation before the step does
                    if failure is not None:
                        raise failure
                    task.cancel()
                await asyncio.sleep(0)
                trainer.value += 1
                folder.log_metrics({"step": float(number)})
                run.keep(done=number)

    async def main() -> None:
        nonlocal task
        task = asyncio.create_task(page())
        with pytest.raises(asyncio.CancelledError if failure is None else type(failure)):
            await task

    task: Any = None
    asyncio.run(main())
    assert run.last_step == step - 1
    return stream.getvalue()


def test_the_last_finished_step_is_saved(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", CONFIG)
    told = stopped_in(4, folder, FileTrainer())
    assert told.splitlines() == ["saving step 3; Ctrl-C again to stop at once", "saved step 3"]
    del folder

    folder, resumed = RunFolder(tmp_path / "a", CONFIG, resume=True), FileTrainer()
    stopped_in(7, folder, resumed)
    assert [row["step"] for row in folder.metrics()][:-1] == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in folder.complete_checkpoints()] == ["step-00005", "step-00006"]
    loop = json.loads((folder.checkpoint_path(6) / "loop.json").read_text())
    assert loop["values"] == {"done": 6}
    assert (folder.checkpoint_path(6) / "policy" / "value").read_text() == "6"


def test_the_values_of_a_step_are_kept_as_they_were(tmp_path: Path) -> None:
    folder, state = RunFolder(tmp_path / "a", CONFIG), {"seen": [0]}
    run = Run(CONFIG, folder, Console(io.StringIO()))

    async def page() -> None:
        async with run.steps(policy=cast(Trainer, FileTrainer())) as steps:
            async for step in steps:
                if step == 1:
                    run.keep(state=state, groups=[], count=np.int64(3))
                else:
                    state["seen"].append(1)
                    raise KeyError("answer")

    with pytest.raises(KeyError):
        asyncio.run(page())
    loop = json.loads((folder.checkpoint_path(1) / "loop.json").read_text())
    assert loop["values"] == {"state": {"seen": [0]}, "groups": [], "count": 3}


@pytest.mark.parametrize("value", [math.inf, (1, 2), {1: "a"}, {2}, np.zeros(2), Path("a"), object()])
def test_a_value_that_json_would_change_is_refused(value: object, tmp_path: Path) -> None:
    run = Run(CONFIG, RunFolder(tmp_path / "a", CONFIG), Console(io.StringIO()))

    async def page() -> None:
        async with run.steps(policy=cast(Trainer, FileTrainer())) as steps:
            async for _ in steps:
                run.keep(state=value)

    with pytest.raises(ValueError, match=r"Run.keep: state is"):
        asyncio.run(page())


def test_a_step_whose_parameters_are_gone_is_not_saved(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", CONFIG)
    told = stopped_in(4, folder, FileTrainer(), updated=True)
    assert told.splitlines()[-1] == "step 3 is not saved: step 4 had already changed the parameters"
    assert folder.complete_checkpoints() == []


def test_a_step_that_is_being_saved_is_waited_for(tmp_path: Path) -> None:
    folder, trainer = RunFolder(tmp_path / "a", CONFIG), CountingTrainer()
    told = stopped_in(6, folder, trainer)  # the save of step 5 goes on in the background
    assert told.splitlines()[-1] == "saved step 5"
    assert trainer.saves == 1
    assert [path.name for path in folder.complete_checkpoints()] == ["step-00005"]


def test_an_environment_that_exits_costs_only_its_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", CONFIG)
    with pytest.raises(SystemExit, match="no data"):
        stopped_in(4, folder, FileTrainer(), failure=SystemExit("no data"))
    assert [path.name for path in folder.complete_checkpoints()] == ["step-00003"]


def test_an_error_of_the_loop_waits_for_a_save(tmp_path: Path) -> None:
    folder, trainer = RunFolder(tmp_path / "a", CONFIG), CountingTrainer()
    assert stopped_in(6, folder, trainer, failure=KeyError("answer")) == "saved step 5\n"
    assert trainer.saves == 1
    assert [path.name for path in folder.complete_checkpoints()] == ["step-00005"]


def test_where_an_error_keeps_its_folder_the_run_resumes(tmp_path: Path) -> None:
    kept = RunFolder(tmp_path / "a", CONFIG)  # as the traceback does that a notebook shows
    with pytest.raises(ValueError, match="in use by another run, in this process or another"):
        RunFolder(tmp_path / "a", CONFIG, resume=True)
    stopped_in(4, kept, FileTrainer(), failure=KeyError("answer"))

    folder, resumed = RunFolder(tmp_path / "a", CONFIG, resume=True), FileTrainer()
    with pytest.raises(ValueError, match="in use by another run, in this process or another"):
        RunFolder(tmp_path / "a", CONFIG, resume=True)
    stopped_in(5, folder, resumed)
    assert resumed.value == 4
    assert [row["step"] for row in folder.metrics()][:-1] == [1, 2, 3, 4]


def test_a_save_that_fails_is_told_and_the_run_still_ends(tmp_path: Path) -> None:
    told = stopped_in(3, RunFolder(tmp_path / "a", CONFIG), FullDisk())
    assert told.splitlines()[-1] == "step 2 is not saved: OSError: [Errno 28] No space left on device"


def test_where_there_is_nothing_to_save(tmp_path: Path) -> None:
    without = replace(CONFIG, checkpoint_every=0)
    folder, trainer = RunFolder(tmp_path / "a", without), CountingTrainer()
    assert stopped_in(3, folder, trainer, config=without) == "step 2 is not saved: checkpoint_every is 0\n"
    assert stopped_in(1, RunFolder(tmp_path / "b", CONFIG), trainer) == ""
    assert trainer.saves == 0


class DeadTrainer(FileTrainer):
    """Answers no call once `policy_version` says that it died."""

    async def policy_version(self) -> int:
        if self.value == 4:  # after four updates, in the fifth step
            raise MeshError("trainer", "rank 0 died")
        return self.value


STORE_DIED = MeshError("store", "a process died")


@pytest.mark.parametrize("failure", [STORE_DIED, KeyError("answer")])
def test_a_failure_costs_only_the_step_in_hand(failure: Exception, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", CONFIG)
    assert stopped_in(4, folder, FileTrainer(), failure=failure).splitlines() == ["saved step 3"]
    folder.begin_again()
    resumed = FileTrainer()
    stopped_in(5, folder, resumed)
    assert [row["step"] for row in folder.metrics()][:-1] == [1, 2, 3, 4]
    assert resumed.value == 4


@pytest.mark.parametrize(
    ("step", "trainer", "updated"), [(4, FileTrainer, True), (5, DeadTrainer, True), (3, FullDisk, False)]
)
def test_after_a_failure_nothing_else_is_saved(
    step: int, trainer: type[FileTrainer], updated: bool, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "a", CONFIG)
    assert stopped_in(step, folder, trainer(), updated=updated, failure=STORE_DIED) == ""
    assert folder.complete_checkpoints() == []
