"""Eight CUDA GPUs of 80 GB: a Qwen3 model, given by `--model DIRECTORY`, learns to spell words backward."""

from controller.loops.accumulate import AccumulateConfig
from generator.config import GeneratorConfig
from rl.envs.reasoning import ReasoningGym
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> AccumulateConfig:
    """Four GPUs train, four generate. Every step learns from about the same number of tokens."""
    return AccumulateConfig(
        model="Qwen3-4B",
        env=ReasoningGym(task="spell_backward", params={"min_word_len": 5}),
        trainer=TrainerConfig(
            data_parallel_shard=4, max_tokens_per_microbatch=16384, activation_checkpointing="selective", compile=True
        ),
        generator=GeneratorConfig(tensor_parallel=4, max_model_len=4096, max_num_seqs=256),
        sampling=SamplingParams(max_tokens=2048),
        num_steps=200,
        prompts_per_step=32,
        group_size=8,
        tokens_per_step=200_000,
        learning_rate=2e-6,
        lora_learning_rate=2e-5,
        kl_target=0.002,
        checkpoint_every=50,
    )
