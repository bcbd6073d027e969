import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from controller.commands.command_line import CommandEndedError
from controller.commands.recipes import find_recipe, load_recipe, override
from controller.commands.resume import check_inputs, inputs_of, resumed_configuration
from controller.commands.saved_recipe import add_options, find_run, resume_hint, save_recipe
from controller.runs.checkpoints import loop_of
from controller.runs.folder import CONFIG_FILE, RunFolder, read_json, write_json
from rl.types import PathOrName
from tests.controller.commands.sown_secrets import run_with_secrets
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


@dataclasses.dataclass(frozen=True)
class _Data:
    path: Path
    question: str = "The answer is a/b."


@dataclasses.dataclass(frozen=True)
class _Config:
    model: PathOrName
    data: tuple[_Data, ...]
    log: str = "none"


@pytest.fixture
def named(tmp_path: Path) -> _Config:
    """A run in `tmp_path / "run"` that names a model, a file and a folder of data."""
    for file in (
        "m/config.json",
        "m/w.safetensors",
        "m/.cache/x.json",
        "train.jsonl",
        "set/main/a.parquet",
        "set/i.json",
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("one")
    data = (_Data(tmp_path / "train.jsonl"), _Data(tmp_path / "set"), _Data(tmp_path / "missing.jsonl"))
    config = _Config(model=str(tmp_path / "m"), data=data)
    save_recipe(RunFolder(tmp_path / "run", config).path, RECIPE, [], inputs=inputs_of(config))
    return config


@pytest.mark.parametrize(
    ("file", "input_"),
    [("m/config.json", "m"), ("m/w.safetensors", "m"), ("train.jsonl",) * 2, ("set/main/a.parquet", "set")],
)
@pytest.mark.parametrize("content", ["two", "longer", None])
def test_a_run_whose_inputs_changed_is_not_resumed(
    named: _Config, file: str, input_: str, content: str | None, tmp_path: Path
) -> None:
    check_inputs(tmp_path / "run", named)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    with pytest.raises(
        ValueError, match=f"^{re.escape(str(tmp_path / input_))} changed since the run in .* began, or went"
    ):
        check_inputs(tmp_path / "run", named)


@pytest.mark.stranger("2.F9")
@pytest.mark.parametrize("name", ["m", "./m", "set", "train"])
def test_an_input_may_be_named_without_a_point(named: _Config, name: str, here: Path) -> None:
    (here / "train.jsonl").rename("train")
    for config in (_Config(model=name, data=()), _Config(model="none", data=(_Data(Path(name)),))):
        assert inputs_of(config).keys() == {str(Path(name)) if config.data else name}


def test_what_no_step_reads_may_change(named: _Config, tmp_path: Path) -> None:
    (tmp_path / "m/.cache/x.json").write_text("two")
    (tmp_path / "missing.jsonl").write_text("new")
    (tmp_path / "log.txt").write_text("x")
    check_inputs(tmp_path / "run", dataclasses.replace(named, log=str(tmp_path / "log.txt")))


def test_a_long_text_is_no_path() -> None:
    assert inputs_of(_Config(model="m", data=(_Data(Path("x"), question="Think. " * 100),))) == {}


def test_the_working_directory_is_no_input(here: Path) -> None:
    (here / "x.json").write_text("one")
    assert inputs_of(_Config(model="./", data=(_Data(here.parent), _Data(Path("x.json"))))).keys() == {"x.json"}


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


SECRET = """
import os
from dataclasses import dataclass, field
from rl.system.secret_fields import Secret
from tests.controller.commands.toy_recipe import ToyConfig

@dataclass(frozen=True, kw_only=True)
class Judge:
    api_key: Secret
    url: str = "http://judge"

@dataclass(frozen=True, kw_only=True)
class SecretConfig(ToyConfig):
    env: Judge = field(default_factory=lambda: Judge(api_key=os.environ["JUDGE_KEY"]))

def recipe():
    return SecretConfig()
"""


def test_secrets_stay_out_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SECRET)
    monkeypatch.setenv("JUDGE_KEY", "sk-first")
    folder = RunFolder(tmp_path / "a", override(load_recipe(file), [], "ownloop")).path
    save_recipe(folder, file, [])
    assert json.loads((folder / "config.json").read_text())["env"] == {"api_key": "***", "url": "http://judge"}
    assert not any(b"sk-first" in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    monkeypatch.setenv("JUDGE_KEY", "sk-second")  # a key may be replaced while a run waits
    assert resumed_configuration(folder, []).env.api_key == "sk-second"
    with pytest.raises(ValueError, match=r"env\.url was 'http://judge' and is now 'http://other'"):
        resumed_configuration(folder, ["--env.url", "http://other"])

    # Whoever gives a secret on the command line has it in a file that nobody else can read.
    add_options(folder, ["--env.api-key", "sk-third", "--seed", "0"])
    assert resumed_configuration(folder, []).env.api_key == "sk-third"
    assert (folder / "recipe.json").stat().st_mode & 0o077 == 0
    assert resume_hint(folder).endswith(f"ownloop run {file} --env.api-key '***' --seed 0")


@pytest.mark.stranger("F1")
def test_no_secret_is_in_a_page_a_help_text_or_a_readable_file(tmp_path: Path) -> None:
    folder = run_with_secrets(tmp_path)
    config, file = resumed_configuration(folder.path, []), tmp_path / "mine.py"
    assert (config.env.option7, config.env.api_key) == ("SOWN-3", "SOWN-4")
    shown = [path.read_text() for path in folder.path.rglob("*") if path.is_file() and path.name != "recipe.json"]
    assert len(shown) >= 4  # metrics, configuration, lock, card and its model's
    with pytest.raises(CommandEndedError) as help_text:
        override(load_recipe(file), ["--help"], "ownloop")
    for text in (*shown, resume_hint(folder.path), str(help_text.value)):
        assert not re.findall(r"SOWN-?\d*", text)
    assert "--env.api-key" in str(help_text.value)


def test_runs_are_found_by_path_and_by_name(tmp_path: Path) -> None:
    run = _run(tmp_path)
    assert find_run(str(run), Path("elsewhere")) == run
    (run / "logs").rename(tmp_path / "logs")  # a copy of a run may lack them
    assert find_run("a", run.parent) == run
    with pytest.raises(ValueError, match=r"there is no run b: no config\.json in b or .*runs/b"):
        find_run("b", run.parent)


def test_a_run_of_a_script_says_how_to_go_on(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a", load_recipe(find_recipe(str(RECIPE)))).path
    with pytest.raises(ValueError, match="continues it with RunFolder"):
        resumed_configuration(run, [])


def test_a_run_of_another_schema_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "runs" / "a" / "logs").mkdir(parents=True)
    for name, value in (("config", {}), ("recipe", {"file": "mine.py", "schema_version": 3})):
        (tmp_path / "runs" / "a" / f"{name}.json").write_text(json.dumps(value))
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.json*")}
    result = ownloop(tmp_path, "run", "--resume", "a")
    assert result.returncode == 2
    assert result.stderr == (
        "error: runs/a is a run of schema 3, and this version of ownloop reads runs of schema 4; use the version that "
        "began it, or start a new run\n"
    )
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.json*")} == before


@pytest.mark.stranger("2.C2")
@pytest.mark.parametrize("loop", ["grpo", "grpo_async", "dapo", "accumulate", "ppo", "sft", "dpo"])
def test_a_run_of_a_version_without_normalisers_goes_on_or_is_refused(loop: str, tmp_path: Path) -> None:
    recipe = find_recipe(f"{loop}_smollm2_cpu")
    others = [(("--loss", "gspo"), True)] if loop in ("grpo", "accumulate") else []
    for options, refused in [((), False), *others]:
        config = override(load_recipe(recipe), options, "test")
        folder = RunFolder(tmp_path / "-".join(("run", *options)), config)
        folder.close()
        save_recipe(folder.path, recipe, options)
        assert resumed_configuration(folder.path, []) == config
        recorded = read_json(folder.path / CONFIG_FILE)
        recorded.pop("normaliser", None)
        write_json(folder.path / CONFIG_FILE, recorded)
        if refused:
            with pytest.raises(ValueError, match=r"loss 'gspo' of .* was a mean over tokens, .* --normaliser tokens"):
                resumed_configuration(folder.path, [])
        else:
            assert resumed_configuration(folder.path, []) == config


@pytest.mark.stranger("2.C3")
def test_a_checkpoint_without_its_place_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "loop.json", {"step": 3, "values": {}})
    with pytest.raises(ValueError, match="lacks its place in the data: an earlier version"):
        loop_of(tmp_path)
