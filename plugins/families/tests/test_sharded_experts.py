"""Experts on several ranks, in processes of their own, with a generator."""

from pathlib import Path

import pytest

from tests.e2e.test_sharded_trainers import assert_trains_as_one_rank_and_is_sampled
from tests.generator.served_models import served_qwen3_moe

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize("pipeline_parallel", [1, 2])
def test_experts_train_as_one_rank_does(pipeline_parallel: int, tmp_path: Path) -> None:
    degrees = {"data_parallel_shard": 2, "expert_parallel": 2, "pipeline_parallel": pipeline_parallel}
    assert_trains_as_one_rank_and_is_sampled(served_qwen3_moe(tmp_path / "model"), degrees, tmp_path)
