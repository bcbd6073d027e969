import json
import shutil
from pathlib import Path

import pytest

from controller.commands.recipes import find_recipe, load_recipe, override
from controller.commands.resume import add_options, find_run, resumed_configuration, save_recipe
from rl.runs.folder import RunFolder, write_json
from tests.controller.commands.old_runs import old_run
from tests.controller.commands.test_cli import ownloop

RECIPE = Path(__file__).with_name("toy_recipe.py")


def _run(tmp_path: Path, *options: str) -> Path:
    """A run of a recipe that its user edits afterwards."""
    file = tmp_path / "mine.py"
    shutil.copy(RECIPE, file)
    config = override(load_recipe(file), options, "ownloop")
    save_recipe(RunFolder(tmp_path / "runs" / "a", config).path, file, options)
    file.write_text(RECIPE.read_text().replace("seed: int = 0", "seed: int = 1"))
    return tmp_path / "runs" / "a"


def test_a_run_keeps_its_recipe_as_it_was(tmp_path: Path) -> None:
    config = resumed_configuration(_run(tmp_path, "--optimizer.learning-rate", "0.5"), [])
    assert (config.seed, config.optimizer.learning_rate, config.num_steps) == (0, 0.5, 2)


def test_steps_may_be_added_again_and_again(tmp_path: Path) -> None:
    run = _run(tmp_path)
    for steps in (7, 9):
        config = resumed_configuration(run, ["--num-steps", str(steps)])
        add_options(RunFolder(run, config, resume=True).path, ["--num-steps", str(steps)])
    assert resumed_configuration(run, []).num_steps == 9


def test_what_would_change_the_past_is_refused(tmp_path: Path) -> None:
    run = _run(tmp_path)
    with pytest.raises(ValueError, match=r"optimizer\.learning_rate was 0\.001 and is now 0\.5; start a new run"):
        resumed_configuration(run, ["--optimizer.learning-rate", "0.5", "--num-steps", "4"])
    with pytest.raises(ValueError, match="unknown option --num-step; did you mean '--num-steps'"):
        resumed_configuration(run, ["--num-step", "4"])
    step = run / "checkpoints" / "step-00005"
    (step / "policy").mkdir(parents=True)
    write_json(step / "loop.json", {"step": 5, "trainers": ["policy"]})
    with pytest.raises(ValueError, match="num_steps is 4; the run has a checkpoint of step 5 already"):
        resumed_configuration(run, ["--num-steps", "4"])


def test_a_recipe_whose_imports_have_changed_is_refused(tmp_path: Path) -> None:
    run = _run(tmp_path)
    config = json.loads((run / "config.json").read_text())
    write_json(run / "config.json", {**config, "optimizer": {"learning_rate": 0.25}})
    with pytest.raises(ValueError, match=r"now makes another configuration: optimizer\.learning_rate was 0\.25"):
        resumed_configuration(run, [])


def test_fields_that_are_newer_than_the_run_have_their_defaults(tmp_path: Path) -> None:
    run = _run(tmp_path)
    config = json.loads((run / "config.json").read_text())
    del config["optimizer"]
    write_json(run / "config.json", config)
    assert resumed_configuration(run, []).optimizer.learning_rate == 1e-3


def test_runs_are_found_by_path_and_by_name(tmp_path: Path) -> None:
    run = _run(tmp_path)
    assert find_run(str(run), Path("elsewhere")) == run
    assert find_run("a", run.parent) == run
    with pytest.raises(ValueError, match=r"there is no run b: neither b nor .*runs/b holds a config\.json"):
        find_run("b", run.parent)


def test_a_run_of_a_script_says_how_to_go_on(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a", load_recipe(find_recipe(str(RECIPE)))).path
    with pytest.raises(ValueError, match="goes on with RunFolder"):
        resumed_configuration(run, [])


def test_a_run_from_before_the_renaming_is_refused_in_one_sentence(tmp_path: Path) -> None:
    old_run(tmp_path / "runs" / "a")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.json*")}
    result = ownloop(tmp_path, "run", "--resume", "a")
    assert result.returncode == 2
    assert result.stderr == (
        "error: runs/a was written by another version of ownloop (schema 1, this is 3): modules that its saved recipe "
        "imports have moved and fields were renamed, so it cannot be resumed; start a new run, or resume it with the "
        "version that began it\n"
    )
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.json*")} == before
