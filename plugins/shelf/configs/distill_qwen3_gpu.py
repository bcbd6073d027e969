"""Eight CUDA GPUs of 80 GB: a small Qwen3 model (`--model DIRECTORY`) learns from a large one (`--teacher`)."""

from generator.config import GeneratorConfig
from ownloop_shelf.distill import DistillConfig
from rl.envs.reasoning import ReasoningGym
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> DistillConfig:
    """Two GPUs train, two generate, and four hold the teacher."""
    return DistillConfig(
        model="Qwen3-1.7B",
        teacher="Qwen3-14B",
        env=ReasoningGym(task="spell_backward", params={"min_word_len": 5}),
        trainer=TrainerConfig(
            data_parallel_shard=2, max_tokens_per_microbatch=16384, activation_checkpointing="selective", compile=True
        ),
        teacher_trainer=TrainerConfig(data_parallel_shard=4, max_tokens_per_microbatch=16384),
        generator=GeneratorConfig(tensor_parallel=2, max_model_len=4096, max_num_seqs=256),
        sampling=SamplingParams(max_tokens=2048),
        num_steps=200,
        prompts_per_step=64,
        group_size=4,
        learning_rate=2e-6,
        lora_learning_rate=2e-5,
        warmup_steps=10,
        checkpoint_every=50,
    )
