"""Trains a program that knows nothing of ownloop: it talks to an OpenAI endpoint, looks a number up and writes it.

.venv/bin/python -m plugins.agents.examples.train_a_program [STEPS]
"""

import asyncio
import sys
from pathlib import Path

from controller.launching.launcher import launch
from controller.runs import resolve_model
from generator.config import GeneratorConfig
from ownloop_agents.endpoint import SessionLimits, agent_endpoint
from ownloop_agents.look_up import LookUp
from ownloop_agents.programs import run_agents
from ownloop_agents.sessions import sessions_to_data
from rl.advantages import group_mean_std
from rl.types import AdamParams, SamplingParams
from trainer.config import TrainerConfig

NUM_STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 12


async def main() -> None:
    """Prints the mean reward of each step."""
    env = LookUp()  # a program, tasks, and a reward
    sampling = SamplingParams(max_tokens=10, seed=0)  # replaces whichever options the program asks for
    model = resolve_model("smollm2-135m-instruct")
    generator_config = GeneratorConfig(dtype="float32", max_model_len=256, num_threads=2)
    trainer_config = TrainerConfig(compute_dtype="float32", num_threads=2)
    async with (
        launch(model, trainer_config, generator_config, Path("logs")) as (trainer, generator),
        agent_endpoint(generator, sampling, SessionLimits(max_calls=4)) as endpoint,
    ):
        await generator.pull_model_state_dict(await trainer.push_model_state_dict())
        for step in range(NUM_STEPS):
            tasks = env.train_problems(seed=0, start=4 * step, count=4)
            groups = await run_agents(endpoint, env.program, tasks, env.reward, num_samples=8, seed=1000 * step)
            rewards = [session.reward for group in groups for session in group.sessions]
            print(f"step {step}: mean reward {sum(rewards) / len(rewards):.3f}", flush=True)
            batch = [datum for group in groups for datum in sessions_to_data(group, group_mean_std)]
            if batch:
                await trainer.forward_backward(batch, "importance_sampling")
                num_tokens = sum(datum.num_loss_tokens for datum in batch)
                await trainer.optim_step(AdamParams(learning_rate=5e-5), grad_scale=1 / num_tokens)
                await generator.pull_model_state_dict(await trainer.push_model_state_dict())


if __name__ == "__main__":
    asyncio.run(main())
