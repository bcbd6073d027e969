"""Files of earlier versions under the names of the current one."""

import json
import math
from pathlib import Path

from controller.runs.folder import RunFolder, read_metrics
from controller.runs.metric_rows import current_fields


def test_an_old_row_is_read_under_the_names_of_today(tmp_path: Path) -> None:
    rows = [
        {"step": 0.0, "heldout_reward": 0.5, "heldout_reward_low": 0.25, "heldout_reward_high": None},
        {"step": 1.0, "logprob_gap_mean": 0.1, "logprob_gap_max": 0.2, "kl_sampler": 0.3, "reward_mean": 0.4},
        {"step": 2.0, "lag_mean": 0.5, "lag_max": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, *others = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(first.pop("eval_reward_high"))
    assert [first, *others] == [
        {"step": 0, "eval_reward": 0.5, "eval_reward_low": 0.25},
        {"step": 1, "logprob_mismatch_mean": 0.1, "logprob_mismatch_max": 0.2, "kl_generator": 0.3, "reward_mean": 0.4},
        {"step": 2, "staleness_mean": 0.5, "staleness_max": 1},
    ]


def test_a_new_row_says_its_version_and_keeps_its_names(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", {})
    folder.log_metrics({"step": 1.0, "lag_mean": 0.5})  # an environment's own metric
    assert json.loads(folder.metrics_file.read_text())["schema_version"] == 3
    (row,) = folder.metrics()
    assert row.keys() == {"step", "lag_mean", "time"}


def test_old_fields_have_the_names_of_today() -> None:
    old = {"num_heldout": 8, "samples_per_prompt": 4, "generator": {"on_death": "resend", "dtype": "float32"}}
    new = {"num_eval": 8, "group_size": 4, "generator": {"on_failure": "retry", "dtype": "float32"}}
    assert current_fields(old) == new
    assert current_fields(new) == new
