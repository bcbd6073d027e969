"""A disk that is full or slow, as a user sees it."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from controller.commands.recipes import load_recipe
from controller.commands.saved_recipe import save_recipe
from controller.runs.folder import RunFolder, read_metrics
from rl.rollouts.columns import read_groups
from tests.controller.commands.test_cli import RECIPE as TOY_RECIPE
from tests.controller.commands.test_cli import ROOT, add_checkpoint, command, ownloop
from tests.waiting import wait_for_end, wait_until

RECIPE = Path(__file__).with_name("recording_recipe.py")


@pytest.mark.seconds
def test_a_full_disk_ends_the_run_in_order(tmp_path: Path) -> None:
    result = ownloop(tmp_path, "run", str(RECIPE), "--name", "a", "--full-after", "3")
    run = tmp_path / "runs" / "a"
    assert result.returncode == 1
    assert (
        f"error: RecordingError: {run}/rollouts/step-00004.parquet cannot be written: File too large" in result.stderr
    )
    assert "Traceback" not in result.stderr
    files = sorted(path.name for path in (run / "rollouts").iterdir())
    assert files == [f"step-{step:05d}.parquet" for step in (1, 2, 3)]  # no half file, not even a hidden one
    assert all(len(read_groups(run / "rollouts" / name)) == 1 for name in files)
    last = max(row["step"] for row in read_metrics(run / "metrics.jsonl"))
    assert 4 <= last <= 8  # the loop did not go on for ever


@pytest.mark.seconds
def test_the_last_step_of_all_may_be_the_one_that_does_not_fit(tmp_path: Path) -> None:
    result = ownloop(tmp_path, "run", str(RECIPE), "--name", "a", "--full-after", "3", "--num-steps", "4")
    assert result.returncode == 1
    assert "step-00004.parquet cannot be written: File too large" in result.stderr


BOOM = """
from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True)
class Config:
    seed: int = 0

    def loop(self):
        return train

async def train(config, folder, console):
    raise RuntimeError("boom")

def recipe():
    return Config()
"""


@pytest.mark.seconds
def test_a_log_that_is_full_hides_no_reason(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text(BOOM)
    run = RunFolder(tmp_path / "runs" / "a", load_recipe(recipe)).path
    save_recipe(run, recipe, [])
    add_checkpoint(run)
    (run / "logs" / "controller.log").symlink_to("/dev/full")
    result = ownloop(tmp_path, "run", "--resume", str(run))
    assert result.returncode == 1
    resuming, error, *_, to_continue, _ = result.stderr.splitlines()
    assert resuming == f"resuming with the recipe in {run}/recipe.json"
    assert error.startswith("error: RuntimeError: boom (")
    assert to_continue == f"to continue: ownloop run --resume {run}"
    assert "Traceback" not in result.stderr


@pytest.mark.seconds
@pytest.mark.parametrize("words", [("list",), ("show", "grpo_smollm2_cpu")])
def test_output_that_does_not_fit_is_said_in_a_sentence(words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command(*words), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "error: the output or a temporary file cannot be written: No space left on device\n"


@pytest.mark.seconds
def test_a_recipe_that_does_not_fit_leaves_its_name_free(tmp_path: Path) -> None:
    recipe = tmp_path / "long.py"
    recipe.write_text(f"{TOY_RECIPE.read_text()}# {'x' * 20_000}\n")
    limited = ["sh", "-c", 'ulimit -f 16 && exec "$@"', "sh", *command("run", str(recipe), "--name", "a")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(limited, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == f"error: {tmp_path}/runs/a/recipe.json cannot be written: File too large\n"
    assert not (tmp_path / "runs").exists()
    assert ownloop(tmp_path, "run", str(recipe), "--name", "a").returncode == 0


@pytest.mark.seconds
def test_a_run_that_is_stopped_has_its_last_step_on_disk(tmp_path: Path) -> None:
    arguments = command("run", str(RECIPE), "--name", "a", "--stopped")
    run, env = tmp_path / "runs" / "a", {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(arguments, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as process:
        wait_until((tmp_path / "recorded").exists, "the first step")
        assert not (run / "rollouts" / "step-00001.parquet").exists()
        process.send_signal(signal.SIGINT)
        status, _, errors = wait_for_end(process, "the run")
    assert status == 130, errors
    assert len(read_groups(run / "rollouts" / "step-00001.parquet")) == 1
