"""As `tiny_recipe`, of the family of models that OWNLOOP_TINY_FAMILY names, on the engine that follows a comma."""

import os
from dataclasses import replace
from pathlib import Path

from controller.loops.grpo import GRPOConfig
from tests.e2e import tiny_recipe
from trainer.families.tiny_families import TINY_FAMILIES


def recipe() -> GRPOConfig:
    """20 steps in float32 on one thread; Qwen3.5, which vLLM serves in bfloat16 alone on a CPU, in that."""
    family, engine = os.environ["OWNLOOP_TINY_FAMILY"].split(",")
    model = Path(os.environ["OWNLOOP_TINY_MODEL"])
    if not model.exists():
        TINY_FAMILIES[family](model)
    base = tiny_recipe.recipe()
    dtype = "bfloat16" if family.startswith("qwen3_5") else "float32"
    return replace(
        base,
        trainer=replace(base.trainer, engine=engine, compute_dtype=dtype),
        generator=replace(base.generator, dtype=dtype),
        num_steps=20,
        group_size=8,
        evaluate_every=10,
        checkpoint_every=4,
    )
