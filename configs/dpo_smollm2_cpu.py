"""Two CPU cores, 8 GiB: SmolLM2-135M-Instruct learns to prefer the largest of four numbers, in minutes."""

from controller.loops.dpo import DPOConfig
from rl.data.sources import EnvPreferences
from rl.envs.largest_number import LargestNumber
from rl.system.hardware import cpu_dtype
from trainer.config import TrainerConfig


def recipe() -> DPOConfig:
    """The largest number is chosen; one of the other three is rejected."""
    return DPOConfig(
        model="smollm2-135m-instruct",
        data=EnvPreferences(env=LargestNumber()),
        trainer=TrainerConfig(compute_dtype=cpu_dtype(), num_threads=2, max_tokens_per_microbatch=2048),
        num_steps=20,
        pairs_per_step=8,
        learning_rate=1e-5,
        lora_learning_rate=1e-4,
        warmup_steps=4,
        num_eval=64,
        evaluate_every=10,
        checkpoint_every=20,
    )
