"""Eight CUDA GPUs of 80 GB: a Qwen3 model, given by `--model DIRECTORY`, learns to spell words backward with DAPO."""

from controller.loops.dapo import DAPOConfig
from generator.config import GeneratorConfig
from rl.envs.reasoning import ReasoningGym
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> DAPOConfig:
    """Four GPUs train, four generate. The clip is the paper's. Answers of more than 1536 tokens are punished."""
    return DAPOConfig(
        model="Qwen3-4B",
        env=ReasoningGym(task="spell_backward", params={"min_word_len": 5}),
        trainer=TrainerConfig(
            data_parallel_shard=4, max_tokens_per_microbatch=16384, activation_checkpointing="selective", compile=True
        ),
        generator=GeneratorConfig(tensor_parallel=4, max_model_len=4096, max_num_seqs=256),
        sampling=SamplingParams(max_tokens=2048),
        num_steps=200,
        prompts_per_step=32,
        group_size=16,
        overlong_cache=512,
        learning_rate=1e-6,
        lora_learning_rate=1e-5,
        warmup_steps=10,
        loss="ppo",
        loss_config={"clip_high_threshold": 1.28},
        eval_samples=8,
        checkpoint_every=50,
    )
