"""As `tests/e2e/tiny_recipe.py`, of the loop `distill`."""

import dataclasses
from pathlib import Path
from typing import Any

from controller.runs.loop_config import RolloutLoopConfig
from ownloop_shelf.distill import DistillConfig
from tests.e2e import tiny_recipe
from tests.generator.served_models import served_llama


def recipe() -> DistillConfig:
    """In float32 on one thread, so that it is repeatable to the last bit."""
    base = tiny_recipe.recipe()
    common: dict[str, Any] = {each.name: getattr(base, each.name) for each in dataclasses.fields(RolloutLoopConfig)}
    teacher = Path(base.model).with_name("teacher")
    if not teacher.exists():
        served_llama(teacher, tied=False)
    return DistillConfig(**common, teacher=str(teacher), teacher_trainer=base.trainer)
