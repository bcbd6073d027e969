from pathlib import Path

from controller.commands.compare import comparison
from rl.runs.folder import RunFolder


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
