"""Two CPU cores, 12 GiB: SmolLM2-135M-Instruct learns word problems of one and two steps, in GSM8K's format."""

from controller.loops.grpo import GRPOConfig
from generator.config import GeneratorConfig
from rl.envs.math_problems import MathProblems
from rl.envs.word_problems import word_problems_file
from rl.hardware import cpu_dtype
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> GRPOConfig:
    """Trainer and generator take turns, so each may use both cores."""
    dtype = cpu_dtype()
    return GRPOConfig(
        model="smollm2-135m-instruct",
        env=MathProblems(
            dataset=str(word_problems_file()),
            template="{question} Work it out in one short line and end with the number.",
            answer_form="anywhere",
        ),
        trainer=TrainerConfig(compute_dtype=dtype, num_threads=2, max_tokens_per_microbatch=2048),
        generator=GeneratorConfig(dtype=dtype, num_threads=2, max_model_len=256, max_num_seqs=128),
        sampling=SamplingParams(max_tokens=48),
        num_steps=30,
        prompts_per_step=16,
        group_size=8,
        learning_rate=2e-5,
        lora_learning_rate=2e-4,
        num_eval=200,
        evaluate_every=10,
        checkpoint_every=15,
    )
