from pathlib import Path

from controller.commands.compare import comparison
from rl.runs.folder import RunFolder
from tests.controller.commands.old_runs import old_run


def _run(path: Path, seed: int, *rewards: float) -> Path:
    folder = RunFolder(path, {"seed": seed, "env": {"count": 4}})
    for step, reward in enumerate(rewards, start=1):
        folder.log_metrics({"step": float(step), "reward_mean": reward, "grad_norm": 0.125, "seconds_step": reward * 7})
    return folder.path


def test_runs_that_part_are_shown_side_by_side(tmp_path: Path) -> None:
    runs = _run(tmp_path / "a", 0, 0.1, 0.25, 0.5), _run(tmp_path / "b", 1, 0.1, 0.375, 0.4, 0.9)
    lines = list(comparison(*runs))
    assert lines[2] == "seed: 0 in A, 1 in B"
    assert lines[3].split() == ["step", "reward_mean", "A", "B", "grad_norm", "A", "B", "seconds_step", "A", "B"]
    assert [line.split()[:5] for line in lines[4:8]] == [
        ["1", "0.1", "0.1", "0.125", "0.125"],
        ["2", "0.25", "0.375", "0.125", "0.125"],
        ["3", "0.5", "0.4", "0.125", "0.125"],
        ["4", "-", "0.9", "-", "0.125"],
    ]
    assert len({len(line) for line in lines[3:8]}) == 1
    assert lines[8] == (
        "The runs first differ at step 2: reward_mean 0.25 and 0.375. The largest difference is that of reward_mean "
        "at step 2: 0.25 and 0.375."
    )


def test_runs_that_are_the_same_but_for_their_speed(tmp_path: Path) -> None:
    run, again = _run(tmp_path / "a", 0, 0.1, 0.25), _run(tmp_path / "b", 0, 0.1, 0.25)
    assert [*comparison(run, again)][-1] == "All metrics of the 2 steps that both have are the same, timings aside."
    assert [*comparison(run, _run(tmp_path / "c", 0))][-1] == "The runs have no step in common."


def test_an_old_run_is_compared_under_the_names_of_today(tmp_path: Path) -> None:
    config = {"seed": 1, "num_eval": 4, "group_size": 2, "generator": {"on_failure": "retry"}}
    new = RunFolder(tmp_path / "new", config)
    new.log_metrics({"step": 0.0, "eval_reward": 0.25, "eval_reward_low": 0.0, "eval_reward_high": 0.5})
    for step, mismatch in ((1.0, 0.125), (2.0, 0.25)):
        row = {"step": step, "reward_mean": 0.5, "logprob_mismatch_mean": mismatch, "staleness_max": 1.0}
        new.log_metrics(row)
    lines = list(comparison(old_run(tmp_path / "old"), new.path))
    assert lines[2] == "seed: 0 in A, 1 in B"
    assert lines[3].split() == ["step", "reward_mean", "A", "B", "eval_reward", "A", "B"]
    assert lines[4].split() == ["0", "-", "-", "0.25", "0.25"]
    assert lines[-1].startswith("The runs first differ at step 2: logprob_mismatch_mean 0.125 and 0.25.")
