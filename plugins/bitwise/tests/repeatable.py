"""One CPU core: `tiny_recipe` as a run that is ahead by up to two steps, on two replicas, bit by bit."""

import dataclasses
from typing import Any

from controller.loops.grpo_async import GRPOAsyncConfig
from rl.types import SamplingParams
from tests.e2e import tiny_recipe


def recipe() -> GRPOAsyncConfig:
    """In bfloat16, with completions that are long enough for a pull to come in between."""
    base = tiny_recipe.recipe()
    fields: dict[str, Any] = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    changed: dict[str, Any] = {
        "trainer": dataclasses.replace(base.trainer, compute_dtype="bfloat16"),
        "generator": dataclasses.replace(base.generator, dtype="bfloat16", num_replicas=2),
        "sampling": SamplingParams(max_tokens=32, top_p=0.95, ignore_eos=True),
        "numerics": "bitwise",
        "checkpoint_every": 2,
        "evaluate_every": 4,
    }
    return GRPOAsyncConfig(**{**fields, **changed}, max_staleness=2)
