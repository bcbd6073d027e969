"""Short runs of the loops in the test's own process, for tests of the files that a run writes."""

import asyncio
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

from controller.commands.recipes import find_recipe, load_recipe
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.loop_config import HeldOut
from rl.tiny_tasks import EvenWords
from rl.types import SamplingParams

LOOPS = ("grpo", "grpo_async", "dapo", "ppo", "accumulate", "sft", "dpo")
_CHANGES: dict[str, dict[str, Any]] = {
    "grpo": {"eval_samples": 2, "loss": "cispo", "held_out": {"easy": HeldOut(env=EvenWords(), num_eval=2)}},
    "grpo_async": {"num_steps": 3},
    "dapo": {"overlong_cache": 2, "loss_config": {"entropy_coef": 0.01}, "evaluation": "beside"},
    "ppo": {"warmup_steps": 0},
    "accumulate": {"tokens_per_step": 24, "loss_config": {"observation_coef": 0.1}},
    "sft": {"max_tokens": 64},
    "dpo": {"max_tokens": 64},
}


def run_loop(loop: str, path: Path, *, resume: bool = False, **changes: Any) -> None:
    """Runs two steps of a loop's recipe, on a tiny model and an environment that rewards random answers too.

    Call `launch_in_process` first. `changes` replace fields of the recipe. With `resume`, `path` holds a run that goes
    on after its newest checkpoint.
    """
    config = load_recipe(find_recipe(f"{loop}_smollm2_cpu"))
    tiny: dict[str, Any] = {"num_steps": 2, "num_eval": 4, "evaluate_every": 2, **_CHANGES.get(loop, {}), **changes}
    if hasattr(config, "env"):
        tiny = {"env": EvenWords(), "sampling": SamplingParams(max_tokens=8), "prompts_per_step": 4, **tiny}
        tiny["generator"] = replace(config.generator, max_model_len=64)
    config = replace(config, **tiny)
    asyncio.run(config.loop()(config, RunFolder(path, config, resume=resume), Console(io.StringIO())))
