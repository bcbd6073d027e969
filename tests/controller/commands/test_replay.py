from pathlib import Path

import numpy as np

from controller.commands.resume import recording_file, replayed
from controller.loops.grpo import GRPOConfig
from controller.runs.folder import RunFolder
from generator.config import GeneratorConfig
from rl.envs.largest_number import LargestNumber
from rl.types import Completion, Group, SamplingParams
from tests.generator.served_models import served_llama
from tests.rl.fakes import single_turn
from trainer.config import TrainerConfig


class Points(LargestNumber):
    """An environment with another best reward."""

    best_reward = 5.0


def _answer(*tokens: int, version: int) -> Completion:
    """A completion of the tokens `w10`, `w11`, ... of the test model."""
    logprobs, versions = (-0.5,) * len(tokens), (version,) * len(tokens)
    text = " ".join(f"w{token}" for token in tokens)
    return Completion(tokens=tokens, logprobs=logprobs, versions=versions, text=text, finish_reason="stop")


def test_the_rollouts_of_a_run_are_replayed(tmp_path: Path) -> None:
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
    folder = RunFolder(tmp_path / "run", {})
    for step in (1, 2):
        answers = (_answer(10, 11, version=step), _answer(12, version=step))
        rollouts = tuple(single_turn((20, 21), answer, reward=float(i)) for i, answer in enumerate(answers))
        folder.log_rollouts(step, [Group(problem_id=f"train {step}", prompt="w20 w21", rollouts=rollouts)])
    folder.flush()
    env = replayed(config, recording_file(folder.path)).env
    assert env.best_reward == 5.0
    groups = [group for step in (1, 2) for group in env.train_groups(step, 0, 1)]
    assert [group.problem_id for group in groups] == ["train 1", "train 2"]
    assert [np.array(group.rewards).tolist() for group in groups] == [[0, 1], [0, 1]]
    assert groups[1].rollouts[0].turns[0].completion.versions == (2, 2)
