"""Eight CUDA GPUs of 80 GB: a Qwen3 model, given by `--model DIRECTORY`, and a critic learn to spell words backward."""

from controller.loops.ppo import PPOConfig
from generator.config import GeneratorConfig
from rl.algorithms.actor_critic import PPOParams
from rl.envs.reasoning import ReasoningGym
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> PPOConfig:
    """Two GPUs each for policy, critic, reference and generator."""
    return PPOConfig(
        model="Qwen3-1.7B",
        env=ReasoningGym(task="spell_backward", params={"min_word_len": 5}),
        trainer=TrainerConfig(
            data_parallel_shard=2, max_tokens_per_microbatch=16384, activation_checkpointing="selective", compile=True
        ),
        critic=TrainerConfig(
            head="value",
            data_parallel_shard=2,
            max_tokens_per_microbatch=16384,
            activation_checkpointing="selective",
            compile=True,
        ),
        generator=GeneratorConfig(tensor_parallel=2, max_model_len=4096, max_num_seqs=256),
        sampling=SamplingParams(max_tokens=2048),
        num_steps=200,
        prompts_per_step=128,
        group_size=4,
        learning_rate=1e-6,
        lora_learning_rate=1e-5,
        critic_learning_rate=5e-6,
        ppo=PPOParams(kl_coef=0.005, minibatches_per_epoch=4),
        checkpoint_every=50,
    )
