"""One CUDA GPU of 16 GB: SmolLM2-135M-Instruct learns to calculate with Python as its tool, with larger numbers."""

from controller.loops.grpo import GRPOConfig
from generator.config import GeneratorConfig
from ownloop_tasks.python_arithmetic import PythonArithmetic
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> GRPOConfig:
    """Trainer and generator share the GPU, so vLLM gets only a part of its memory."""
    return GRPOConfig(
        model="smollm2-135m-instruct",
        env=PythonArithmetic(num_digits=4),
        trainer=TrainerConfig(max_tokens_per_microbatch=16384),
        generator=GeneratorConfig(max_model_len=512, max_num_seqs=512, engine_args={"gpu_memory_utilization": 0.4}),
        sampling=SamplingParams(max_tokens=64),
        num_steps=100,
        prompts_per_step=64,
        group_size=16,
        learning_rate=1e-5,
        lora_learning_rate=1e-4,
        num_eval=512,
    )
