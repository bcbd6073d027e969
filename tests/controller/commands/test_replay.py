from pathlib import Path

import numpy as np

from controller.commands.resume import recording_file, replayed
from controller.loops.grpo import GRPOConfig
from generator.config import GeneratorConfig
from rl.envs.largest_number import LargestNumber
from rl.types import SamplingParams
from tests.controller.commands.old_runs import old_run
from tests.generator.served_models import served_llama
from trainer.config import TrainerConfig


class Points(LargestNumber):
    """An environment with another best reward."""

    best_reward = 5.0


def test_the_rollouts_of_an_old_run_are_replayed(tmp_path: Path) -> None:
    config = GRPOConfig(
        model=str(served_llama(tmp_path / "model", tied=True)),
        env=Points(),
        trainer=TrainerConfig(),
        generator=GeneratorConfig(),
        sampling=SamplingParams(max_tokens=4),
        num_steps=2,
        prompts_per_step=1,
        group_size=2,
        learning_rate=1e-3,
    )
    env = replayed(config, recording_file(old_run(tmp_path / "run"))).env
    assert env.best_reward == 5.0
    groups = [group for step in (0, 1) for group in env.train_groups(step, 1)]
    assert [group.problem_id for group in groups] == ["train 1", "train 2"]
    assert [np.array(group.rewards).tolist() for group in groups] == [[0, 1], [0, 1]]
    assert groups[1].rollouts[0].turns[0].completion.versions == (2, 2)
