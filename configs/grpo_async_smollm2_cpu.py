"""Two CPU cores, 12 GiB: SmolLM2-135M-Instruct learns to tell the largest of four numbers, asynchronously."""

from controller.loops.grpo_async import GRPOAsyncConfig
from generator.config import GeneratorConfig
from rl.envs.largest_number import LargestNumber
from rl.system.hardware import cpu_dtype
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> GRPOAsyncConfig:
    """Trainer and generator work at the same time, on one core each."""
    dtype = cpu_dtype()
    return GRPOAsyncConfig(
        model="smollm2-135m-instruct",
        env=LargestNumber(),
        trainer=TrainerConfig(compute_dtype=dtype, num_threads=1, max_tokens_per_microbatch=2048),
        generator=GeneratorConfig(dtype=dtype, num_threads=1, max_model_len=256, max_num_seqs=128),
        sampling=SamplingParams(max_tokens=8),
        num_steps=24,
        prompts_per_step=16,
        group_size=8,
        max_staleness=1,
        learning_rate=2e-5,
        lora_learning_rate=2e-4,
        num_eval=256,
        evaluate_every=8,
        checkpoint_every=12,
    )
