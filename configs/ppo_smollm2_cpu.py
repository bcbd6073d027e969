"""Two CPU cores, 16 GiB: SmolLM2-135M-Instruct and a critic learn to tell the largest of four numbers."""

from controller.loops.ppo import PPOConfig
from generator.config import GeneratorConfig
from rl.algorithms.actor_critic import PPOParams
from rl.envs.largest_number import LargestNumber
from rl.system.hardware import cpu_dtype
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> PPOConfig:
    """Policy and critic train at the same time, on a core each. The policy learns slowly, so the critic can keep up."""
    dtype = cpu_dtype()
    return PPOConfig(
        model="smollm2-135m-instruct",
        env=LargestNumber(),
        trainer=TrainerConfig(compute_dtype=dtype, num_threads=1, max_tokens_per_microbatch=2048),
        critic=TrainerConfig(head="value", compute_dtype=dtype, num_threads=1, max_tokens_per_microbatch=2048),
        generator=GeneratorConfig(dtype=dtype, num_threads=2, max_model_len=256, max_num_seqs=128),
        sampling=SamplingParams(max_tokens=8),
        num_steps=20,
        prompts_per_step=16,
        group_size=8,
        learning_rate=2e-6,
        lora_learning_rate=2e-5,
        warmup_steps=8,
        critic_learning_rate=1e-4,
        ppo=PPOParams(kl_coef=0.02, minibatches_per_epoch=8),
        critic_loss_config={"clip_range": 0.0},
        num_eval=128,
        evaluate_every=10,
        checkpoint_every=10,
    )
