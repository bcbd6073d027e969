"""GRPO as one script: `python examples/grpo_loop.py --num-steps 24` teaches a small model to compare numbers."""

import argparse
import asyncio
from pathlib import Path

import numpy as np

from controller.launching.launcher import launch
from controller.runs import resolve_model
from generator.config import GeneratorConfig
from rl.advantages import group_mean_std
from rl.envs.largest_number import LargestNumber
from rl.losses import token_mean
from rl.rollouts.episodes import group_to_data, rollout_groups
from rl.rollouts.rendering import Renderer
from rl.types import AdamParams, SamplingParams
from trainer.config import TrainerConfig


async def main(model: Path, num_steps: int) -> None:
    """Samples 8 answers to each of 16 problems, learns from them once, pushes the new weights; `num_steps` times."""
    env, renderer, sampling = LargestNumber(), Renderer(model), SamplingParams(max_tokens=8)
    trainer_config = TrainerConfig(compute_dtype="float32", num_threads=2)
    generator_config = GeneratorConfig(dtype="float32", num_threads=2, max_model_len=256, max_num_seqs=128)
    async with launch(model, trainer_config, generator_config, Path("runs/example-logs")) as (trainer, generator):
        await generator.pull_model_state_dict(await trainer.push_model_state_dict())
        for step in range(num_steps):
            problems = env.train_problems(seed=0, start=step * 16, count=16)
            groups = await rollout_groups(generator, renderer, problems, sampling, num_samples=8)
            batch = [datum for group in groups for datum in group_to_data(group, group_mean_std)]
            if batch:  # empty when in every group all rewards were equal
                await trainer.forward_backward(batch, "importance_sampling")
                await trainer.optim_step(AdamParams(learning_rate=2e-5, grad_clip_norm=1.0), token_mean(batch))
                await generator.pull_model_state_dict(await trainer.push_model_state_dict())
            print(f"step {step + 1}: mean reward {np.mean([group.rewards.mean() for group in groups]):.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a local Hugging Face directory, or this name")
    parser.add_argument("--num-steps", type=int, default=24)
    options = parser.parse_args()
    asyncio.run(main(resolve_model(options.model), options.num_steps))
