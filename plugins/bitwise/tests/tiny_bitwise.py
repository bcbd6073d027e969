"""As `tests.e2e.tiny_loops`, with `numerics` "bitwise": in bfloat16, with a cut, on two replicas."""

import os
from dataclasses import replace

from controller.runs.loop_config import RolloutLoopConfig
from rl.lora import LoRAConfig
from tests.e2e import tiny_loops, tiny_recipe


def recipe() -> RolloutLoopConfig:
    """Of the loop that OWNLOOP_TINY_LOOP names, or of grpo with an adapter."""
    has_adapter = os.environ["OWNLOOP_TINY_LOOP"] == "grpo"
    base = tiny_recipe.recipe() if has_adapter else tiny_loops.recipe()
    return replace(
        base,
        numerics="bitwise",
        lora=LoRAConfig(rank=4) if has_adapter else None,
        trainer=replace(base.trainer, compute_dtype="bfloat16"),
        generator=replace(base.generator, dtype="bfloat16", num_replicas=2),
        sampling=replace(base.sampling, temperature=0.9, top_p=0.9),
        learning_rate=1e-2 if has_adapter else base.learning_rate,
    )
