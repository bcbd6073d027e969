"""Runs of two steps in the test's own process, as `ownloop run` leaves them."""

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest

from controller.commands import processes
from controller.commands.recipes import configuration
from controller.commands.saved_recipe import save_recipe
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from tests.docs.in_process import launch_in_process

RECIPE = '''"""Any machine: a random model says even words."""

from dataclasses import replace

from controller.commands.recipes import find_recipe, load_recipe
from rl.tiny_tasks import EvenWords
from rl.types import SamplingParams

def recipe():
    config = load_recipe(find_recipe("grpo_smollm2_cpu"))
    return replace(
        config, env=EvenWords(), sampling=SamplingParams(max_tokens=8), prompts_per_step=4, group_size=4,
        generator=replace(config.generator, max_model_len=64, dtype="float32"),
        trainer=replace(config.trainer, compute_dtype="float32"),
        num_steps=2, num_eval=4, evaluate_every=2, checkpoint_every=1, learning_rate=3e-3,
    )
'''


def in_this_process(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Commands start no processes, and leave those of the tests alone. The working directory is `folder`."""
    launch_in_process(monkeypatch, folder / "cache")
    monkeypatch.setattr(processes, "adopt_orphans", lambda: None)
    monkeypatch.setattr(processes, "end_descendants", lambda **_: None)
    monkeypatch.chdir(folder)
    (folder / "mine.py").write_text(RECIPE)


def finished_run(name: str, *options: str) -> Path:
    """A run of `mine.py` in the working directory's `runs`; call `in_this_process` first."""
    config = configuration("mine.py", options, "run")
    folder = RunFolder(Path("runs") / name, config)
    save_recipe(folder.path, Path("mine.py"), options)
    to_the_end(config, folder)
    return Path("runs") / name


def to_the_end(config: Any, folder: RunFolder) -> None:
    """Runs the loop of a configuration."""
    asyncio.run(config.loop()(config, folder, Console(io.StringIO())))
    folder.close()
