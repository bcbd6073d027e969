"""Eight CUDA GPUs of 40 GB: Qwen2.5-1.5B-Instruct learns GSM8K with rollouts that run ahead, with AReaL's settings."""

from controller.loops.grpo_async import GRPOAsyncConfig
from generator.config import GeneratorConfig
from ownloop_tasks.math_problems import MathProblems
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> GRPOAsyncConfig:
    """Four GPUs train while four generate.

    Prompt, batch, group, length, staleness, epochs (10 of 29 steps) and learning rate are as in AReaL's example,
    which reports a reward of 0.778 on the test set: https://github.com/inclusionAI/AReaL/tree/main/examples/math. It
    also has a weight decay of 0.017 and clips the ratio, which this loop corrects by a capped importance weight.
    """
    return GRPOAsyncConfig(
        model="Qwen/Qwen2.5-1.5B-Instruct",
        env=MathProblems(
            dataset="openai/gsm8k",
            subset="main",
            eval_split="test",
            template="{question}\nPlease put your final answer within \\boxed{}.",
        ),
        trainer=TrainerConfig(data_parallel_shard=4, max_tokens_per_microbatch=10240, compile=True),
        generator=GeneratorConfig(num_replicas=4, max_model_len=2048, max_num_seqs=256),
        sampling=SamplingParams(max_tokens=1024),
        num_steps=290,
        prompts_per_step=256,
        group_size=4,
        max_staleness=2,
        learning_rate=6e-6,
        lora_learning_rate=6e-5,
        num_eval=1319,
        evaluate_every=29,
        checkpoint_every=29,
    )
