"""Two CPU cores, 8 GiB: SmolLM2-135M-Instruct is shown the largest of four numbers until it knows it, in minutes."""

from controller.loops.sft import SFTConfig
from rl.data.sources import EnvExamples
from rl.envs.largest_number import LargestNumber
from rl.system.hardware import cpu_dtype
from trainer.config import TrainerConfig


def recipe() -> SFTConfig:
    """The problems of `grpo_smollm2_cpu`, with their answers."""
    return SFTConfig(
        model="smollm2-135m-instruct",
        data=EnvExamples(env=LargestNumber()),
        trainer=TrainerConfig(compute_dtype=cpu_dtype(), num_threads=2, max_tokens_per_microbatch=2048),
        num_steps=24,
        examples_per_step=16,
        learning_rate=3e-5,
        lora_learning_rate=3e-4,
        warmup_steps=4,
        num_eval=128,
        evaluate_every=8,
        checkpoint_every=24,
    )
