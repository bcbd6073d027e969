"""Two CPU cores, 12 GiB: SmolLM2-135M-Instruct learns to tell the largest of four numbers, in steps of equal size."""

from controller.loops.accumulate import AccumulateConfig
from generator.config import GeneratorConfig
from rl.envs.largest_number import LargestNumber
from rl.system.hardware import cpu_dtype
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> AccumulateConfig:
    """A step takes two or three rollout batches, and more once most groups are solved and have no signal."""
    dtype = cpu_dtype()
    return AccumulateConfig(
        model="smollm2-135m-instruct",
        env=LargestNumber(),
        trainer=TrainerConfig(compute_dtype=dtype, num_threads=2, max_tokens_per_microbatch=2048),
        generator=GeneratorConfig(dtype=dtype, num_threads=2, max_model_len=256, max_num_seqs=128),
        sampling=SamplingParams(max_tokens=8),
        num_steps=12,
        prompts_per_step=8,
        group_size=8,
        tokens_per_step=300,
        learning_rate=3e-5,
        lora_learning_rate=3e-4,
        kl_target=0.02,
        num_eval=128,
        evaluate_every=6,
        checkpoint_every=6,
    )
