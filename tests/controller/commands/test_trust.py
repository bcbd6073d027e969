"""A run is resumed with its saved recipe only if a run of this user wrote that recipe."""

import json
import pwd
import shutil
from pathlib import Path
from typing import Any

import pytest

from controller.commands.recipes import load_recipe
from controller.commands.resume import resumed_configuration
from controller.commands.saved_recipe import add_options, key_file, save_recipe
from controller.runs.folder import RunFolder, write_json
from tests.controller.commands.test_cli import add_checkpoint, ownloop

RECIPE = Path(__file__).with_name("toy_recipe.py")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without a key."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = RunFolder(tmp_path / "runs" / "a", load_recipe(RECIPE)).path
    save_recipe(folder, RECIPE, [])
    return folder


def change(run: Path, **changed: Any) -> None:
    """Changes a saved recipe, as one could who may write to the folder."""
    write_json(run / "recipe.json", {**json.loads((run / "recipe.json").read_text()), **changed})


def plant(run: Path, file: Path) -> None:
    """Makes the saved recipe create a file, and otherwise do what it did."""
    source = json.loads((run / "recipe.json").read_text())["source"]
    change(run, source=f"{source}\nopen({str(file)!r}, 'w')\n")


def test_a_recipe_of_a_windows_editor_resumes(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.read_text(), encoding="utf-8-sig")
    folder = RunFolder(tmp_path / "runs" / "b", load_recipe(recipe)).path
    save_recipe(folder, recipe, ["--num-steps", "5"])
    assert resumed_configuration(folder, []).num_steps == 5


def test_a_planted_recipe_is_refused_and_not_run(run: Path, tmp_path: Path) -> None:
    plant(run, tmp_path / "was_here")
    add_checkpoint(run)
    with pytest.raises(ValueError, match=r"runs/a/recipe\.json is not signed .*Read \"source\".* add --trust"):
        resumed_configuration(run, [])
    result = ownloop(tmp_path, "run", "--resume", "a")
    assert result.returncode == 2
    assert "error: runs/a/recipe.json is not signed with" in result.stderr
    assert not (tmp_path / "was_here").exists()


def test_trusting_a_recipe_runs_it_and_makes_it_ones_own(run: Path, tmp_path: Path) -> None:
    plant(run, tmp_path / "was_here")
    add_checkpoint(run)
    result = ownloop(tmp_path, "run", "--resume", "a", "--trust")
    assert "resuming with the recipe in runs/a/recipe.json" in result.stderr
    assert (tmp_path / "was_here").exists()
    assert resumed_configuration(run, []).num_steps == 2


@pytest.mark.parametrize(
    "changed", [{"options": [["--seed", "3"]]}, {"replay": "/elsewhere"}, {"signature": ""}, {"signature": None}]
)
def test_every_field_is_signed(run: Path, changed: dict[str, Any]) -> None:
    change(run, **changed)
    with pytest.raises(ValueError, match="is not signed"):
        resumed_configuration(run, [])


def test_a_folder_may_be_moved_and_its_options_grow(run: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(run, tmp_path / "elsewhere" / "b")
    shutil.rmtree(run)
    for steps in ("7", "9"):
        assert resumed_configuration(moved, ["--num-steps", steps]).num_steps == int(steps)
        add_options(moved, ["--num-steps", steps])
    assert resumed_configuration(moved, []).num_steps == 9


def test_options_do_not_sign_a_recipe_that_has_changed(run: Path, tmp_path: Path) -> None:
    resumed_configuration(run, [])
    plant(run, tmp_path / "was_here")
    add_options(run, ["--num-steps", "7"])
    with pytest.raises(ValueError, match="is not signed"):
        resumed_configuration(run, [])


def test_a_recipe_of_another_user_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    with pytest.raises(ValueError, match="is not signed"):
        resumed_configuration(run, [])
    save_recipe(RunFolder(tmp_path / "own", load_recipe(RECIPE)).path, RECIPE, [])  # makes the other user's key
    with pytest.raises(ValueError, match="is not signed"):
        resumed_configuration(run, [])
    assert resumed_configuration(run, [], trust=True).num_steps == 2


def test_nobody_else_may_read_the_key(run: Path, home: Path) -> None:
    key = home / "ownloop" / "recipe.key"
    assert key == key_file()
    assert key.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in key.parent.iterdir()] == ["recipe.key"]
    key.chmod(0o644)
    with pytest.raises(ValueError, match=r"recipe\.key must belong to you and be closed to others; .*chmod 600"):
        resumed_configuration(run, [])


def test_a_run_starts_where_no_key_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    folder = RunFolder(tmp_path / "runs" / "a", load_recipe(RECIPE)).path
    save_recipe(folder, RECIPE, [])
    with pytest.raises(ValueError, match="is not signed"):
        resumed_configuration(folder, [])
    assert resumed_configuration(folder, [], trust=True).num_steps == 2


def test_a_user_without_a_home_directory_starts_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", dict[int, Any]().__getitem__)
    folder = RunFolder(tmp_path / "runs" / "a", load_recipe(RECIPE)).path
    save_recipe(folder, RECIPE, [])
    assert resumed_configuration(folder, [], trust=True).num_steps == 2


def test_the_key_is_in_the_home_folder_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in (None, "", "relative/path"):  # the XDG specification ignores relative paths
        monkeypatch.delenv("XDG_STATE_HOME", raising=False)
        if unset is not None:
            monkeypatch.setenv("XDG_STATE_HOME", unset)
        assert key_file() == tmp_path / ".local" / "state" / "ownloop" / "recipe.key"


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
