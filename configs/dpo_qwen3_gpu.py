"""Eight CUDA GPUs of 80 GB: a Qwen3 model, given by `--model DIRECTORY`, learns the preferences of a JSONL file."""

from pathlib import Path

from controller.loops.dpo import DPOConfig
from rl.data.sources import JsonlPreferences
from trainer.config import TrainerConfig


def recipe() -> DPOConfig:
    """`--data.path FILE` names a file of lines {"prompt": text or messages, "chosen": text, "rejected": text}."""
    return DPOConfig(
        model="Qwen3-4B",
        data=JsonlPreferences(path=Path("data/preferences.jsonl")),
        trainer=TrainerConfig(
            data_parallel_shard=8, max_tokens_per_microbatch=32768, activation_checkpointing="selective", compile=True
        ),
        num_steps=500,
        pairs_per_step=64,
        learning_rate=5e-7,
        lora_learning_rate=5e-6,
        warmup_steps=50,
        max_tokens=4096,
        num_eval=1000,
        evaluate_every=100,
        checkpoint_every=100,
    )
