"""Runs of a recipe of any loop whose controller is killed, and that go on."""

from pathlib import Path

from controller.runs.folder import complete_checkpoints
from tests.e2e.cli_runs import kill_controller, metric_rows, model_hash, ownloop, wait

NUM_STEPS = 16
_OPTIONS = ("--checkpoint-every", "4", "--evaluate-every", "6", "--num-steps", str(NUM_STEPS))


def killed_and_resumed(tmp_path: Path, recipe: str) -> Path:
    """The folder of a run whose controller was killed after five steps, and that was resumed."""
    folder = tmp_path / "runs" / "killed"
    run = ownloop(tmp_path, recipe, "--name", "killed", *_OPTIONS)
    wait(run, lambda: complete_checkpoints(folder / "checkpoints"))  # it is written while the run goes on
    kill_controller(run, folder, 5)
    run = ownloop(tmp_path, "--resume", "killed")
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    return folder


def same_as_whole(tmp_path: Path, recipe: str) -> None:
    """Asserts that a run that was killed and resumed has the metrics and the model of one that was left alone."""
    whole = ownloop(tmp_path, recipe, "--name", "whole", *_OPTIONS)
    output, _ = whole.communicate(timeout=300)
    assert whole.returncode == 0, output
    expected = tmp_path / "runs" / "whole"
    folder = killed_and_resumed(tmp_path, recipe)
    assert metric_rows(folder) == metric_rows(expected)
    assert model_hash(folder) == model_hash(expected)
