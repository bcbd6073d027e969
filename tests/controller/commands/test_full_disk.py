"""A disk that fills up in the middle of a run, as a user sees it."""

from pathlib import Path

from rl.rollouts.columns import read_groups
from rl.runs.folder import read_metrics
from tests.controller.commands.test_cli import ownloop

RECIPE = Path(__file__).with_name("recording_recipe.py")


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
