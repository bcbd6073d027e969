"""Two CPU cores, 12 GiB: SmolLM2-135M-Instruct is trained on a program that knows no ownloop and has a tool."""

from generator.config import GeneratorConfig
from ownloop_agents.agent_loop import AgentConfig
from ownloop_agents.endpoint import SessionLimits
from ownloop_agents.look_up import LookUp
from rl.system.hardware import cpu_dtype
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> AgentConfig:
    """Trainer and generator take turns, so each may use both cores.

    The held-out reward goes from 0.53 to 1.00 with the seeds 0 and 1; benchmarks/LEARNING.md has the runs.
    """
    dtype = cpu_dtype()
    return AgentConfig(
        model="smollm2-135m-instruct",
        env=LookUp(),
        trainer=TrainerConfig(compute_dtype=dtype, num_threads=2, max_tokens_per_microbatch=2048),
        generator=GeneratorConfig(dtype=dtype, num_threads=2, max_model_len=256, max_num_seqs=64),
        sampling=SamplingParams(max_tokens=10),
        limits=SessionLimits(max_calls=4),
        num_steps=12,
        prompts_per_step=6,
        group_size=8,
        learning_rate=5e-5,
        lora_learning_rate=5e-4,
        num_eval=64,
        evaluate_every=12,
        checkpoint_every=6,
    )
