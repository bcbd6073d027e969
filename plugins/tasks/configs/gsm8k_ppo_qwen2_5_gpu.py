"""Four CUDA GPUs of 24 GB: Qwen2.5-0.5B-Instruct learns GSM8K with PPO and a critic, with verl's settings."""

from controller.loops.ppo import PPOConfig
from generator.config import GeneratorConfig
from ownloop_tasks.math_problems import MathProblems
from rl.algorithms.actor_critic import PPOParams
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> PPOConfig:
    """One GPU each for policy, critic, reference and generator.

    Prompt, batch, minibatches, lengths, learning rates, KL penalty and epochs (15 of 29 steps) are as in verl's
    quickstart. verl's table of baselines has 49.6 % of the test set right before and 56.7 % after its PPO:
    https://verl.readthedocs.io/en/latest/algo/baseline.html. There an answer has to follow "####"; here the last number
    of an answer counts.
    """
    return PPOConfig(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        env=MathProblems(
            dataset="openai/gsm8k",
            subset="main",
            eval_split="test",
            template='{question} Let\'s think step by step and output the final answer after "####".',
            answer_form="anywhere",
        ),
        trainer=TrainerConfig(max_tokens_per_microbatch=16384, compile=True),
        critic=TrainerConfig(head="value", max_tokens_per_microbatch=16384, compile=True),
        generator=GeneratorConfig(max_model_len=1024, max_num_seqs=256),
        sampling=SamplingParams(max_tokens=512),
        num_steps=435,
        prompts_per_step=256,
        group_size=1,
        learning_rate=1e-6,
        lora_learning_rate=1e-5,
        critic_learning_rate=1e-5,
        ppo=PPOParams(kl_coef=0.001, minibatches_per_epoch=4),
        num_eval=1319,
        evaluate_every=29,
        checkpoint_every=29,
    )
