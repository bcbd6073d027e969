"""A run is the same run whichever engine trains: a real generator samples from what it trained."""

from pathlib import Path

import pytest

from tests.e2e.cli_runs import ROOT, metric_rows, ownloop
from tests.e2e.test_sharded_trainers import assert_trains_as_one_rank_and_is_sampled
from tests.generator.served_models import served_qwen3

pytestmark = pytest.mark.e2e
RECIPE = str(ROOT / "tests" / "e2e" / "tiny_recipe.py")


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


@pytest.mark.slow
@pytest.mark.parametrize("degree", ["pipeline_parallel", "data_parallel_shard", "context_parallel"])
def test_ranks_train_as_one_does(degree: str, tmp_path: Path) -> None:
    degrees = {"engine": "megatron", degree: 2, "tensor_parallel": 2}
    model = served_qwen3(tmp_path / "model", tied=False)
    assert_trains_as_one_rank_and_is_sampled(model, degrees, tmp_path)
