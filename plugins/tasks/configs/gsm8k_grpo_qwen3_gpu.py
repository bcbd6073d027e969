"""Eight CUDA GPUs of 80 GB: Qwen3-1.7B learns GSM8K with GRPO, with verl's settings."""

from controller.loops.grpo import GRPOConfig
from generator.config import GeneratorConfig
from ownloop_tasks.math_problems import MathProblems
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> GRPOConfig:
    """The GPUs take turns at training and generating.

    Lengths, group and learning rate are as in verl's example run_qwen3-1.7b.sh, and so is the batch of an optimizer
    step, 80 prompts: https://github.com/volcengine/verl/tree/main/examples/grpo_trainer. There, 1024 prompts are
    sampled at a time and learned from in parts, with a KL term; here every step samples its own, and needs neither.
    """
    return GRPOConfig(
        model="Qwen/Qwen3-1.7B",
        env=MathProblems(dataset="openai/gsm8k", subset="main", eval_split="test"),
        trainer=TrainerConfig(data_parallel_shard=8, max_tokens_per_microbatch=16384, compile=True),
        generator=GeneratorConfig(
            num_replicas=8, max_model_len=1536, max_num_seqs=256, engine_args={"gpu_memory_utilization": 0.6}
        ),
        placement="colocated",
        sampling=SamplingParams(max_tokens=1024),
        num_steps=186,
        prompts_per_step=80,
        group_size=3,
        learning_rate=1e-6,
        lora_learning_rate=1e-5,
        num_eval=1319,
        evaluate_every=31,
        checkpoint_every=31,
    )
