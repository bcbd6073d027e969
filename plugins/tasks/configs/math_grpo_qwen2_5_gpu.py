"""Eight CUDA GPUs of 80 GB: Qwen2.5-7B-Instruct learns the problems of MATH with GRPO, with verl's settings."""

from controller.loops.grpo import GRPOConfig
from generator.config import GeneratorConfig
from ownloop_tasks.math_problems import MathProblems
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> GRPOConfig:
    """The GPUs take turns at training and generating.

    Lengths, group and learning rate are as in verl's example run_qwen2_5-7b_math.sh, and so is the batch of an
    optimizer step, 256 prompts: https://github.com/volcengine/verl/tree/main/examples/grpo_trainer. There, 1024 prompts
    of MATH and GSM8K are sampled at a time and learned from in four parts, with a KL term; here every step samples its
    own, and needs neither. The dataset is MATH (https://arxiv.org/abs/2103.03874) in its usual copy.
    """
    return GRPOConfig(
        model="Qwen/Qwen2.5-7B-Instruct",
        env=MathProblems(
            dataset="DigitalLearningGmbH/MATH-lighteval",
            question="problem",
            answer="solution",
            answer_marker="",
            eval_split="test",
            skip_unreadable=True,
        ),
        trainer=TrainerConfig(
            data_parallel_shard=8, max_tokens_per_microbatch=16384, activation_checkpointing="selective", compile=True
        ),
        generator=GeneratorConfig(
            num_replicas=4,
            tensor_parallel=2,
            max_model_len=2048,
            max_num_seqs=256,
            engine_args={"gpu_memory_utilization": 0.6},
        ),
        placement="colocated",
        sampling=SamplingParams(max_tokens=1024),
        num_steps=290,
        prompts_per_step=256,
        group_size=5,
        learning_rate=1e-6,
        lora_learning_rate=1e-5,
        num_eval=500,
        evaluate_every=29,
        checkpoint_every=29,
    )
