"""Two CPU cores, 12 GiB: SmolLM2-135M-Instruct learns to calculate with Python as its tool, a line at a time."""

from controller.loops.grpo import GRPOConfig
from generator.config import GeneratorConfig
from ownloop_tasks.python_arithmetic import PythonArithmetic
from rl.system.hardware import cpu_dtype
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> GRPOConfig:
    """Trainer and generator take turns, so each may use both cores."""
    dtype = cpu_dtype()
    return GRPOConfig(
        model="smollm2-135m-instruct",
        env=PythonArithmetic(),
        trainer=TrainerConfig(compute_dtype=dtype, num_threads=2, max_tokens_per_microbatch=2048),
        generator=GeneratorConfig(dtype=dtype, num_threads=2, max_model_len=256, max_num_seqs=128),
        sampling=SamplingParams(max_tokens=24),
        num_steps=16,
        prompts_per_step=8,
        group_size=8,
        learning_rate=2e-5,
        lora_learning_rate=2e-4,
        num_eval=128,
        evaluate_every=4,
        checkpoint_every=8,
    )
