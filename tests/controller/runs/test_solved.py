"""A run whose policy gets the best reward for every problem has nothing left to learn: it ends early, as a success."""

import asyncio
import io
from pathlib import Path
from typing import Any, cast

import pytest

from controller.processes.errors import TrainingStoppedError
from controller.runs import Console, LoopConfig, Run, RunFolder
from rl.configuration import configuration
from rl.protocols import Trainer
from rl.types import Completion, Group, Rollout, Turn
from tests.controller.runs.test_checkpoints import FileTrainer
from tests.controller.runs.test_training_run import end_step
from trainer.config import TrainerConfig


class Modest:
    """An environment that gives less than a point."""

    best_reward = 0.7


@configuration
class Config(LoopConfig):
    """A loop with an environment."""

    env: Any = None


CONFIG = Config(model="", trainer=TrainerConfig(), num_steps=40, learning_rate=0.0, checkpoint_every=30)


def group(*rewards: float) -> Group:
    """A group of rollouts with these rewards."""
    completion = Completion(tokens=(1,), logprobs=(0.0,), versions=(0,), text="w1", finish_reason="stop")
    turns = (Turn(prompt_tokens=(2,), completion=completion),)
    return Group(problem_id="", prompt="", rollouts=tuple(Rollout(turns=turns, reward=reward) for reward in rewards))


def steps_done(config: Config, folder: RunFolder, *steps: float | None) -> tuple[list[int], str]:
    """Runs a loop whose step i has the reward `steps[i - 1]` throughout, or an update if that is None."""
    stream, done = io.StringIO(), list[int]()
    run = Run(config, folder, Console(stream))

    async def page() -> None:
        async with run.steps(policy=cast(Trainer, FileTrainer())) as remaining:
            async for step in remaining:
                reward = steps[step - 1]
                if reward is None:
                    async with run.clock("optim_step"):
                        await asyncio.sleep(0)
                    end_step(run, step)
                else:
                    run.end_step_without_update([group(reward, reward), group(reward)])
                done.append(step)
            assert run.last_step == (done[-1] if done else len(folder.metrics()))
        run.finish()

    asyncio.run(page())
    return done, stream.getvalue()


@pytest.mark.seconds
def test_ten_best_steps_in_a_row_are_a_success(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", CONFIG)
    done, told = steps_done(CONFIG, folder, 1.0, None, *[1.0] * 11)
    assert done == list(range(1, 13))  # the update began the count anew
    assert "solved at step 12: every reward of the last 10 steps was 1, the best there is" in told
    assert told.splitlines()[-1].startswith("Solved at step 12. Finished")
    assert [path.name for path in folder.complete_checkpoints()] == ["step-00012"]
    del folder

    folder = RunFolder(tmp_path / "a", CONFIG, resume=True)
    done, told = steps_done(CONFIG, folder)
    assert done == []
    assert "solved at step 12" in told
    assert told.splitlines()[-1].startswith("Solved at step 12. Finished")


def test_an_environment_may_say_that_its_best_reward_is_another(tmp_path: Path) -> None:
    modest = Config(
        model="", trainer=TrainerConfig(), num_steps=40, learning_rate=0.0, checkpoint_every=30, env=Modest()
    )
    done, told = steps_done(modest, RunFolder(tmp_path / "a", {}), *[0.7] * 10)
    assert done == list(range(1, 11))
    assert "every reward of the last 10 steps was 0.7, the best there is" in told
    with pytest.raises(TrainingStoppedError, match="10 steps in a row, up to step 10"):
        steps_done(CONFIG, RunFolder(tmp_path / "b", {}), *[0.7] * 10)


@pytest.mark.parametrize("reward", [0.0, 0.999])
def test_equal_rewards_below_the_best_end_the_run_as_a_failure(reward: float, tmp_path: Path) -> None:
    with pytest.raises(TrainingStoppedError, match="had nothing to learn from: in every group all rewards were equal"):
        steps_done(CONFIG, RunFolder(tmp_path / "a", CONFIG), *[1.0] * 5, *[reward] * 6)
