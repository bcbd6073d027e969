"""Two CPU cores, 12 GiB: SmolLM2-135M-Instruct learns to tell the largest of four numbers, with DAPO."""

from controller.loops.dapo import DAPOConfig
from generator.config import GeneratorConfig
from rl.envs.largest_number import LargestNumber
from rl.system.hardware import cpu_dtype
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> DAPOConfig:
    """Trainer and generator take turns, so each may use both cores."""
    dtype = cpu_dtype()
    return DAPOConfig(
        model="smollm2-135m-instruct",
        env=LargestNumber(),
        trainer=TrainerConfig(compute_dtype=dtype, num_threads=2, max_tokens_per_microbatch=2048),
        generator=GeneratorConfig(dtype=dtype, num_threads=2, max_model_len=256, max_num_seqs=128),
        sampling=SamplingParams(max_tokens=8),
        num_steps=20,
        prompts_per_step=12,
        group_size=8,
        max_rounds=3,
        learning_rate=2e-5,
        lora_learning_rate=2e-4,
        loss="ppo",
        loss_config={"clip_high_threshold": 1.28},
        num_eval=256,
        checkpoint_every=10,
    )
