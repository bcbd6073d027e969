"""Eight CUDA GPUs of 80 GB: a Qwen3 model, given by `--model DIRECTORY`, learns the answers of a JSONL file."""

from pathlib import Path

from controller.loops.sft import SFTConfig
from rl.data.sources import JsonlExamples
from trainer.config import TrainerConfig


def recipe() -> SFTConfig:
    """`--data.path FILE` names a file of lines {"prompt": text or messages, "completion": text}."""
    return SFTConfig(
        model="Qwen3-4B",
        data=JsonlExamples(path=Path("data/train.jsonl")),
        trainer=TrainerConfig(
            data_parallel_shard=8, max_tokens_per_microbatch=32768, activation_checkpointing="selective", compile=True
        ),
        num_steps=1000,
        examples_per_step=128,
        learning_rate=1e-5,
        lora_learning_rate=1e-4,
        warmup_steps=30,
        max_tokens=8192,
        num_eval=1000,
        evaluate_every=100,
        checkpoint_every=100,
    )
