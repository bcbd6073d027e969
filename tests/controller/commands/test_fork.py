"""`ownloop run --fork`: a new run from a checkpoint of another."""

import json
from collections.abc import Generator
from pathlib import Path

import pytest

from controller.commands.resume import folder_with_weights, forked_configuration, forked_folder, resumed_configuration
from controller.commands.run import Run
from controller.commands.saved_recipe import command_of
from controller.runs.checkpoints import checkpoint_of
from controller.runs.recording import recorded_files
from rl.rollouts.columns import read_groups
from rl.system.disk import OwnedFolder, RecordingError
from tests.controller.commands.finished_runs import finished_run, in_this_process, to_the_end
from tests.controller.commands.test_run import contents, refused
from tests.e2e.cli_runs import metric_rows, model_hash
from tests.rl.recordings import disk_of


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """A finished run of four steps with a checkpoint of each; the working directory holds its `runs`."""
    folder = tmp_path_factory.mktemp("fork")
    with pytest.MonkeyPatch.context() as patch:
        in_this_process(patch, folder)
        yield finished_run("a", "--num-steps", "4", "--keep-checkpoints", "4")


def fork(parent: Path, name: str, step: int, *options: str) -> Path:
    """Forks a run and runs the fork to its end."""
    config = forked_configuration(parent, options, print)
    folder = forked_folder(parent.parent / name, config, parent, checkpoint_of(parent, step), options)
    to_the_end(config, folder)
    return parent.parent / name


@pytest.mark.seconds
def test_without_overrides_its_metrics_equal_its_parent_s(parent: Path) -> None:
    before = contents(parent)
    child = fork(parent, "same", 2)
    assert metric_rows(child) == metric_rows(parent)
    assert model_hash(child) == model_hash(parent)
    files = [(kind, step) for kind, step, _ in recorded_files(child / "rollouts")]
    assert files == [(kind, step) for kind, step, _ in recorded_files(parent / "rollouts")]
    assert contents(parent) == before, "the parent is as it was"
    assert json.loads((child / "parent.json").read_text()) == {"run": str(parent.absolute()), "step": 2}


@pytest.mark.seconds
@pytest.mark.slow
def test_overrides_hold_for_the_steps_to_come(parent: Path) -> None:
    child = fork(parent, "other", 2, "--learning-rate", "1e-2", "--num-steps", "5")
    ours, theirs = metric_rows(child), metric_rows(parent)
    at = [row["step"] for row in ours].index(3)
    assert ours[:at] == theirs[:at]
    assert ours[at]["reward_mean"] == theirs[at]["reward_mean"], "the same policy and the same problems"
    rates = [row["learning_rate"] for row in ours if "learning_rate" in row]
    assert rates == [3e-3, 3e-3, 1e-2, 1e-2, 1e-2]
    config = resumed_configuration(child, [])
    assert (config.learning_rate, config.num_steps) == (1e-2, 5), "it can be resumed itself"


@pytest.mark.seconds
def test_a_fork_that_does_not_fit_leaves_no_folder(parent: Path) -> None:
    elsewhere = OwnedFolder("ownloop-test-", in_memory=True)
    if elsewhere.path.stat().st_dev == parent.stat().st_dev:
        pytest.skip("this machine has no second file system in memory, where files are copied and not linked")
    checkpoint = checkpoint_of(parent, 2)
    largest = max(filter(Path.is_file, checkpoint.rglob("*")), key=lambda file: file.stat().st_size)
    config, target = forked_configuration(parent, (), print), elsewhere.path / "fork"
    with disk_of(largest.stat().st_size - 1), pytest.raises(RecordingError) as caught:
        forked_folder(target, config, parent, checkpoint, ())
    assert caught.value.file == target / "checkpoints" / ".step-00002" / largest.relative_to(checkpoint)
    assert not target.exists()
    folder = forked_folder(target, config, parent, checkpoint, ())
    assert [path.name for path in folder.complete_checkpoints()] == ["step-00002"]
    elsewhere.remove()


@pytest.mark.seconds
def test_what_cannot_be_forked(parent: Path, capfd: pytest.CaptureFixture[str]) -> None:
    error = refused(capfd, "run", "--fork", "a", "--at", "9")
    assert error == "error: runs/a has no checkpoint of step 9; it has steps 1, 2, 3, 4\n"
    error = refused(capfd, "run", "--fork", "a", "--at", "4")
    assert error == "error: num_steps is 4, and the checkpoint is of step 4; --num-steps must be more\n"
    error = refused(capfd, "run", "--fork", "a", "--learning-rat", "1")
    assert "unknown option --learning-rat; did you mean '--learning-rate'" in error
    error = refused(capfd, "run", "--fork", "a", "--resume", "a")
    assert error == "error: --resume continues a run and --fork begins a new one; give one of them\n"
    error = refused(capfd, "run", "--resume", "a", "--at", "2")
    assert error == "error: --at is for a new run; --resume continues in the folder of a\n"
    error = refused(capfd, "run", "--fork", "a", "--at", "2", "--name", "a")
    assert error.endswith("/runs/a already holds a run; name a new folder\n")


@pytest.mark.seconds
def test_a_fork_with_weights_alone_begins_anew_with_them(parent: Path) -> None:
    checkpoint, path = checkpoint_of(parent, 2), parent.parent / "weights"
    config = forked_configuration(parent, ("--num-steps", "2"), print)
    folder = folder_with_weights(path, config, parent, checkpoint, ("--num-steps", "2"))
    to_the_end(config, folder)
    rows = metric_rows(path)
    assert [(row["step"], row["policy_version"]) for row in rows if "grad_norm" in row] == [(1, 1), (2, 2)]
    # The evaluation before the first step is of the weights; the problems of the first step are those of a new run.
    evaluations = [
        {row["step"]: row["eval_reward"] for row in metric_rows(p) if "eval_reward" in row} for p in (parent, path)
    ]
    assert evaluations[1][0] == evaluations[0][2]
    first, anew = (read_groups(p / "rollouts" / "step-00001.parquet") for p in (parent, path))
    assert [group.problem_id for group in anew] == [group.problem_id for group in first]
    assert anew != first
    assert json.loads((path / "parent.json").read_text()) == {
        "run": str(parent.absolute()), "step": 2, "restore": "weights"
    }  # fmt: skip
    assert command_of(path).startswith(f"ownloop run --fork {parent.absolute()} --at 2 --restore weights ")


def test_restore_is_for_forks() -> None:
    with pytest.raises(ValueError, match="--restore is for --fork; a recipe is run from its beginning"):
        Run(recipe="grpo_smollm2_cpu", restore="weights")
    with pytest.raises(ValueError, match="--restore is for a new run; --resume continues in the folder of a"):
        Run(resume="a", restore="weights")
