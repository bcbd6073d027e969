"""`ownloop export`, `ownloop eval` and `ownloop runs`, on runs that took place."""

import io
import json
import shutil
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from controller.commands import chat_and_eval
from controller.commands.cli import main
from controller.commands.export_run import add_model_card
from controller.runs.folder import RunFolder, read_metrics, state_of
from tests.controller.commands.finished_runs import RECIPE, finished_run, in_this_process
from tests.controller.commands.test_run import refused


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """A finished run; the working directory holds its `runs` and its recipe."""
    folder = tmp_path_factory.mktemp("export")
    with pytest.MonkeyPatch.context() as patch:
        in_this_process(patch, folder)
        yield finished_run("a", "--warmup-steps", "1")


def ownloop(capfd: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines that a command prints."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    output = capfd.readouterr()
    assert stop.value.code == 0, output.err
    return output.out.splitlines()


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model directory."""
    return load_file(directory / "model.safetensors")


@pytest.mark.seconds
def test_the_newest_checkpoint_is_the_trained_model(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (printed,) = ownloop(capfd, "export", "a")
    assert printed == "runs/a/exports/step-00002"
    exported, trained = weights(Path(printed)), weights(run / "model")
    assert all(torch.equal(exported[name], trained[name]) for name in trained | exported)

    ownloop(capfd, "export", "a", "--step", "1", "--to", "first")
    first = weights(Path("first"))
    assert any(not torch.equal(first[name], trained[name]) for name in trained)
    error = refused(capfd, "export", "a", "--step", "1", "--to", "first")
    assert error == "error: first exists; --to names a new folder\n"
    error = refused(capfd, "export", "a", "--step", "7")
    assert error == "error: runs/a has no checkpoint of step 7; it has steps 1, 2\n"


def test_a_run_that_cannot_be_written_is_exported(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "logs" / "export", ignore_errors=True)
    (run / "logs" / "export").touch()  # no one can make the folder, the superuser included
    Path("empty").mkdir()
    assert ownloop(capfd, "export", "a", "--to", "empty") == ["empty"]
    assert weights(Path("empty")).keys() == weights(run / "model").keys()
    (run / "logs" / "export").unlink()


def test_an_exported_model_has_a_card(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ownloop(capfd, "export", "a", "--step", "1", "--to", "carded")
    card = (Path("carded") / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\ntags:\n- ownloop\n---\n\n# a\n")
    assert "`smollm2-135m-instruct`, trained with ownloop for 1 step.\n" in card
    assert f"ownloop run {Path('mine.py').absolute()} --warmup-steps 1\n" in card
    assert "## Data\n\neven words:\n" in card
    rows = read_metrics(run / "metrics.jsonl")
    assert f"| | after step 0 | 95 % interval |\n|---|---|---|\n| reward | {rows[0]['eval_reward']:.3f} | " in card
    first = next(row for row in rows if "reward_mean" in row)
    assert f"| reward_mean | {first['reward_mean']:.4g} | {first['reward_mean']:.4g} |" in card
    add_model_card(run, "even words")
    final = (run / "model" / "README.md").read_text()
    assert f"| reward | {rows[0]['eval_reward']:.3f} | {rows[-1]['eval_reward']:.3f} |" in final


def test_the_card_of_a_model_of_the_hub_names_its_base(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "hub", {"model": "lab/tiny@" + "a" * 40})
    (folder.path / "model").mkdir()
    (folder.path / "model" / "config.json").write_text("{}")
    add_model_card(folder.path, "words")
    assert "base_model: lab/tiny\n---" in (folder.path / "model" / "README.md").read_text()


def test_a_run_and_a_model_are_evaluated(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = {row["step"]: row["eval_reward"] for row in read_metrics(run / "metrics.jsonl") if "eval_reward" in row}

    def reward(*arguments: str) -> str:
        *_, line = ownloop(capfd, "eval", *arguments, "--num-eval", "4")
        return line.split()[4]

    assert reward("a", "mine.py") == f"{rows[2]:.3f}"
    assert reward("a", "mine.py", "--step", "2") == f"{rows[2]:.3f}"
    assert reward("smollm2-135m-instruct", "mine.py") == f"{rows[0]:.3f}"
    assert rows[0] != rows[2]
    error = refused(capfd, "eval", "smollm2-135m-instruct", "mine.py", "--step", "2")
    assert error == "error: --step is 2, but smollm2-135m-instruct is no run; a model has no steps\n"
    error = refused(capfd, "eval", "a", "sft_smollm2_cpu")
    assert error.startswith("error: sft_smollm2_cpu has no env")


def test_several_held_out_sets_are_one_table(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    two = "eval_samples=2, held_out={'more': HeldOut(env=EvenWords(), num_eval=3)},"
    recipe = RECIPE.replace("num_steps=2,", f"num_steps=2, {two}")
    Path("suite.py").write_text(
        recipe.replace("from rl.tiny", "from controller.runs.loop_config import HeldOut\nfrom rl.tiny")
    )
    *_, head, _, own, more = ownloop(capfd, "eval", "a", "suite.py")
    assert head.split(" | ") == ["| set", "problems", "answers", "reward", "pass_at_1", "pass_at_2", "majority_at_2 |"]
    assert own.startswith("| (recipe) | 4 | 2 | ")
    last = read_metrics(run / "metrics.jsonl")[-1]["eval_reward"]  # of four greedy answers, of which three are asked
    assert more.startswith("| more | 3 | 1 | ")
    assert float(more.split()[7]) * 3 <= last * 4 + 0.01


def test_runs_are_listed(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    going_on = RunFolder(run.parent / "b", {"num_steps": 9})
    going_on.log_metrics({"step": 3.0, "loss": 0.25})
    first, second, third = ownloop(capfd, "runs")
    assert first.split() == ["run", "state", "step", "in", "training", "held-out", "begun"]
    assert second.split()[:5] == ["b", "running", "3/9", "loss", "0.250"]
    last = read_metrics(run / "metrics.jsonl")[-1]["eval_reward"]
    assert third.split()[:3] == ["a", "finished", "2/2"]
    assert f"reward {last:.3f}" in third
    going_on.close()
    assert ownloop(capfd, "runs")[1].split()[1:4] == ["stopped,", "nothing", "saved"]
    assert ownloop(capfd, "runs", "--runs", "none") == ["there are no runs in none; --runs names another folder"]


def test_a_resumed_run_is_not_finished_by_its_earlier_model(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", {})
    (folder.path / "model").mkdir()
    (folder.path / "model" / "config.json").write_text("{}")
    folder.log_metrics({"step": 3.0})
    assert state_of(folder.path) == "running"
    folder.close()
    step = folder.checkpoint_path(3)
    step.mkdir(parents=True)
    (step / "loop.json").write_text(json.dumps({"step": 3, "trainers": []}))
    assert state_of(folder.path) == "stopped, saved at 3"


@pytest.mark.seconds
@pytest.mark.stranger("2.F3")
def test_a_run_of_an_adapter_is_exported_whole_and_measured_as_it_was_trained(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted = finished_run("adapted", "--lora.rank", "4", "--learning-rate", "0.1")
    rows = {row["step"]: row["eval_reward"] for row in read_metrics(adapted / "metrics.jsonl") if "eval_reward" in row}
    (newest,) = ownloop(capfd, "export", "adapted")
    exported, trained = weights(Path(newest)), weights(adapted / "model")
    assert exported.keys() == weights(run / "model").keys() | {"lm_head.weight"}
    assert all(torch.equal(exported[name], trained[name]) for name in trained | exported)
    shutil.rmtree(newest)
    shutil.rmtree(adapted / "model")  # a merge would be rounded
    monkeypatch.setattr(chat_and_eval, "model_of", None)
    (alone,) = ownloop(capfd, "export", "adapted", "--adapter")
    adapter = load_file(Path(alone) / "adapter_model.safetensors")
    assert json.loads((Path(alone) / "adapter_config.json").read_text())["r"] == 4
    assert all(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)
    assert "runs/a trained the model itself" in refused(capfd, "export", "a", "--adapter")
    for arguments in (["adapted", "mine.py"], ["adapted", "mine.py", "--step", "2", "--lora.rank", "8"]):
        *_, line = ownloop(capfd, "eval", *arguments, "--num-eval", "4")
        assert line.split()[4] == f"{rows[2]:.3f}"
    assert rows[0] != rows[2]
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5\n"))
    assert len(ownloop(capfd, "chat", "adapted", "--step", "1", "--max-tokens", "3")) == 1
