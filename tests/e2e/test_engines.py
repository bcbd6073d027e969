"""A run is the same run whichever engine trains: a real generator samples from what it trained."""

from pathlib import Path

import pytest

from tests.e2e.cli_runs import metric_rows, ownloop

pytestmark = pytest.mark.e2e
RECIPE = str(Path(__file__).with_name("tiny_recipe.py"))


@pytest.mark.slow
def test_five_steps_with_megatron_are_those_with_torchtitan(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    options = ("--num-steps", "5", "--num-eval", "4", "--evaluate-every", "5")
    for engine in ("torchtitan", "megatron"):
        run = ownloop(tmp_path, RECIPE, *options, "--runs", ".", "--name", engine, "--trainer.engine", engine)
        output = run.communicate(timeout=280)[0]
        assert run.returncode == 0, output
    expected, rows = metric_rows(tmp_path / "torchtitan"), metric_rows(tmp_path / "megatron")
    assert len(rows) == len(expected)
    for row, of_titan in zip(rows, expected, strict=True):
        compared = {name for name in of_titan if not name.startswith(("memory", "rss", "peak"))}
        assert row.keys() >= compared
        for name in compared:
            assert row[name] == pytest.approx(of_titan[name], rel=1e-3, abs=1e-3), name
