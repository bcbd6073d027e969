"""Two CPU cores, 8 GiB: SmolLM2-135M-Instruct with a value head learns to rate answers: a reward model."""

from controller.loops.dpo import DPOConfig
from rl.data.sources import EnvPreferences
from rl.envs.largest_number import LargestNumber
from rl.system.hardware import cpu_dtype
from trainer.config import TrainerConfig


def recipe() -> DPOConfig:
    """The largest number is chosen, one of the other three rejected. `ownloop_tasks.reward_model` gives its rewards."""
    return DPOConfig(
        model="smollm2-135m-instruct",
        data=EnvPreferences(env=LargestNumber()),
        loss="bradley_terry",
        beta=1.0,
        trainer=TrainerConfig(head="value", compute_dtype=cpu_dtype(), num_threads=2, max_tokens_per_microbatch=2048),
        num_steps=40,
        pairs_per_step=32,
        learning_rate=2e-5,
        warmup_steps=4,
        num_eval=256,
        evaluate_every=10,
        checkpoint_every=20,
    )
