"""A run's saved recipe: what it may contain, and that it may be moved and resumed with further options."""

import shutil
from pathlib import Path

import pytest

from controller.commands.recipes import load_recipe
from controller.commands.resume import resumed_configuration
from controller.commands.saved_recipe import add_options, save_recipe
from controller.runs.folder import RunFolder

RECIPE = Path(__file__).with_name("toy_recipe.py")


def test_a_recipe_of_a_windows_editor_resumes(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.read_text(), encoding="utf-8-sig")
    folder = RunFolder(tmp_path / "runs" / "b", load_recipe(recipe)).path
    save_recipe(folder, recipe, ["--num-steps", "5"])
    assert resumed_configuration(folder, []).num_steps == 5


def test_a_folder_may_be_moved_and_its_options_grow(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "a", load_recipe(RECIPE)).path
    save_recipe(run, RECIPE, [])
    moved = shutil.copytree(run, tmp_path / "elsewhere" / "b")
    shutil.rmtree(run)
    for steps in ("7", "9"):
        assert resumed_configuration(moved, ["--num-steps", steps]).num_steps == int(steps)
        add_options(moved, ["--num-steps", steps])
    assert resumed_configuration(moved, []).num_steps == 9


def test_other_gpus_may_be_named_when_a_run_is_resumed(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "from dataclasses import dataclass, field\nfrom trainer.config import TrainerConfig\n"
        "@dataclass(frozen=True)\nclass Config:\n"
        "    trainer: TrainerConfig = field(default_factory=TrainerConfig)\n    num_steps: int = 1\n"
        "def recipe(): return Config()\n"
    )
    folder = RunFolder(tmp_path / "a", load_recipe(recipe)).path
    save_recipe(folder, recipe, [])
    assert resumed_configuration(folder, ["--trainer.gpus", "3"]).trainer.gpus == (3,)
    with pytest.raises(ValueError, match=r"keeps its configuration except for num_steps, .* and gpus: trainer\.seed"):
        resumed_configuration(folder, ["--trainer.seed", "3"])
