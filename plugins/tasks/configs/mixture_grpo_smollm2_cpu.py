"""Two CPU cores, 12 GiB: SmolLM2-135M-Instruct learns three tasks at once, the hard one later, in minutes."""

from controller.loops.grpo import GRPOConfig
from generator.config import GeneratorConfig
from ownloop_tasks.mixture import Mixture, Ramp, Task
from rl.envs.largest_number import LargestNumber
from rl.system.hardware import cpu_dtype
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> GRPOConfig:
    """A ramp counts problems over all steps, of which each has sixteen."""
    dtype = cpu_dtype()
    return GRPOConfig(
        model="smollm2-135m-instruct",
        env=Mixture(
            two=Task(LargestNumber(count=2), weight=Ramp(((0, 1.0), (256, 0.3)))),
            four=Task(LargestNumber(count=4)),
            six=Task(LargestNumber(count=6), weight=Ramp(((0, 0.3), (256, 1.0)))),
        ),
        trainer=TrainerConfig(compute_dtype=dtype, num_threads=2, max_tokens_per_microbatch=2048),
        generator=GeneratorConfig(dtype=dtype, num_threads=2, max_model_len=256, max_num_seqs=128),
        sampling=SamplingParams(max_tokens=8),
        num_steps=32,
        prompts_per_step=16,
        group_size=8,
        learning_rate=2e-5,
        num_eval=255,
        evaluate_every=8,
        checkpoint_every=16,
    )
