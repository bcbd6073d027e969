"""One CPU core: a random model of 64 tokens learns to say even words; for tests of whole runs that take seconds."""

import os
from pathlib import Path

from controller.loops.grpo import GRPOConfig
from generator.config import GeneratorConfig
from rl.tiny_tasks import EvenWords
from rl.types import SamplingParams
from trainer.config import TrainerConfig


def recipe() -> GRPOConfig:
    """In float32 on one thread, so that it is repeatable to the last bit."""
    model = Path(os.environ["OWNLOOP_TINY_MODEL"])
    if not model.exists():  # what it is written with takes four seconds to import
        from tests.generator.served_models import served_llama

        served_llama(model, tied=True)
    return GRPOConfig(
        model=str(model),
        env=EvenWords(),
        trainer=TrainerConfig(compute_dtype="float32", max_tokens_per_microbatch=512),
        generator=GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=16),
        sampling=SamplingParams(max_tokens=8),
        num_steps=6,
        prompts_per_step=4,
        group_size=4,
        learning_rate=3e-3,
        num_eval=16,
        evaluate_every=2,
    )
