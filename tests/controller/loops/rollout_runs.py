"""Short runs of loops that learn from rollouts, with a tiny model that vLLM serves in the test's own process."""

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.loop_config import RolloutLoopConfig
from generator.config import GeneratorConfig
from rl.tiny_models import VOCAB_SIZE
from rl.tiny_tasks import EvenWords
from rl.types import SamplingParams
from trainer.config import TrainerConfig

TRAINER = TrainerConfig(compute_dtype="float32", max_tokens_per_microbatch=512)


def rollout_options(model: Path, **options: Any) -> dict[str, Any]:
    """What the recipes have in common."""
    return {
        "model": str(model),
        "env": EvenWords(),
        "trainer": TRAINER,
        "generator": GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=64),
        "sampling": SamplingParams(max_tokens=8),
        "num_eval": 32,
        **options,
    }


def trained(loop: Any, config: RolloutLoopConfig, path: Path) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Trains with the module of a loop. Returns the rows of the optimizer steps and those of the evaluations."""
    folder = RunFolder(path, config)
    asyncio.run(loop.train(config, folder, Console(io.StringIO())))
    assert AutoModelForCausalLM.from_pretrained(path / "model").config.vocab_size == VOCAB_SIZE
    rows = folder.metrics()
    return [row for row in rows if "grad_norm" in row], [row for row in rows if "eval_reward" in row]


def refused(loop: Any, config: RolloutLoopConfig, message: str, path: Path) -> None:
    """Asserts that a run is refused with this message before any process starts."""
    folder = RunFolder(path, config)
    with pytest.raises(ValueError, match=message):
        asyncio.run(loop.train(config, folder, Console(io.StringIO())))
    assert not list(folder.logs.iterdir())
