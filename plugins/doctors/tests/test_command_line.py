"""The commands that this plug-in brings, as words."""

from pathlib import Path

import pytest

from tests.controller.commands.test_cli import assert_quick
from tests.controller.commands.test_command_line import assert_one_sentence
from tests.controller.commands.test_run import (
    DAMAGES,
    OUTSIDE,
    RECIPE,
    assert_needs_a_gpu,
    help_of,
    refused,
    refused_after,
    write_runs,
)


def test_a_mistake_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    assert_one_sentence(["compare"], "compare was given no run; it needs at least two", capfd)


def test_a_long_path_is_not_cut_in_two(capfd: pytest.CaptureFixture[str]) -> None:
    path = f"{'folder/' * 30}curves.pdf"
    assert f"--plot is {path}; " in refused(capfd, "compare", "a", "b", "--plot", path)


def test_a_run_or_a_model_that_is_not_there_is_named(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert_one_sentence(["compare", "a", "b"], "there is no run a: no config.json in a or runs/a", capfd)
    assert_one_sentence(["model", "smollm2"], "model 'smollm2' is neither a local directory nor a known name", capfd)
    assert not list(here.iterdir())


@pytest.mark.stranger("F5")
def test_help_and_mistakes_do_not_load_the_stack() -> None:
    layout = ("check-engine", "fsdp2", "--layout")
    assert_quick(
        [
            (("check-engine", "nosuch"), 2, "engine is 'nosuch'"),
            ((*layout, "tp=2"), 2, "with fields data_parallel_shard"),
            ((*layout, "tensor_parallel=x"), 2, "tensor_parallel is 'x'; it must be a whole"),
            ((*layout, "sequence_parallel=1"), 2, "it must be True or False"),
        ]
    )


def test_a_recipe_for_gpus_needs_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_needs_a_gpu("parity", tmp_path, capfd, monkeypatch)


@pytest.mark.parametrize("command", ["parity", "check-env", "compare", "model"])
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_every_command_has_a_help(command: str, option: str, capfd: pytest.CaptureFixture[str]) -> None:
    shown = help_of(command, option, capfd=capfd)
    assert command != "parity" or "  --limit FLOAT" in shown


@pytest.mark.stranger("F4")
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_sweep_s_name_stays_within_the_folder_of_runs(
    name: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "must be the name of a folder" in refused(capfd, "sweep", str(RECIPE), "--name", name, "--seed", "0", "1")
    assert not list(here.iterdir())


@pytest.mark.stranger("F4")
@pytest.mark.usefixtures("here")
def test_a_damaged_file_of_a_run_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    write_runs("ab")
    assert "missing/x.png: No such file" in refused_after(capfd, "compare", "a", "b", "--plot", "missing/x.png")
    for damage in DAMAGES:
        Path("runs/a/metrics.jsonl").write_bytes(b'{"step": 1, "schema_version": 4}\n' + damage)
        assert "error: runs/a/metrics.jsonl, line 2, is damaged: " in refused_after(capfd, "compare", "a", "b")
