"""Two CPU cores, 12 GiB: SmolLM2-135M-Instruct learns a game of several turns, guessing a number from hints."""

from controller.loops.grpo import GRPOConfig
from generator.config import GeneratorConfig
from ownloop_tasks.guess_number import GuessNumber
from rl.system.hardware import cpu_dtype
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> GRPOConfig:
    """Trainer and generator take turns, so each may use both cores."""
    dtype = cpu_dtype()
    return GRPOConfig(
        model="smollm2-135m-instruct",
        env=GuessNumber(),
        trainer=TrainerConfig(compute_dtype=dtype, num_threads=2, max_tokens_per_microbatch=2048),
        generator=GeneratorConfig(dtype=dtype, num_threads=2, max_model_len=256, max_num_seqs=128),
        sampling=SamplingParams(max_tokens=5),
        num_steps=30,
        prompts_per_step=16,
        group_size=8,
        learning_rate=2e-5,
        lora_learning_rate=2e-4,
        num_eval=256,
        evaluate_every=10,
        checkpoint_every=15,
    )
