"""Rows of a long run: as many as a report needs."""

import itertools
import json
import tracemalloc
from pathlib import Path

from controller.runs.folder import read_metrics
from controller.runs.metric_rows import SCHEMA_VERSION
from ownloop_report.plot import thinned_metrics


def _write(file: Path, num_steps: int) -> None:
    named = {"schema_version": SCHEMA_VERSION}
    with file.open("w") as lines:
        for step in range(1, num_steps + 1):
            row = {
                "step": float(step),
                "seconds_step": 1.0,
                "loss": step / 7,
                "skipped": 0.0,
                "reward_mean": 0.5,
                **named,
            }
            if step % 40 == 0:
                row["env_failures"] = 1.0
            lines.write(json.dumps(row) + "\n")
            if step % 10 == 0:
                lines.write(json.dumps({"step": float(step), "eval_reward": step / num_steps, **named}) + "\n")


def test_a_run_of_usual_length_loses_no_row(tmp_path: Path) -> None:
    _write(file := tmp_path / "metrics.jsonl", 1500)
    assert thinned_metrics(file) == read_metrics(file)


def test_a_long_run_keeps_its_ends_and_every_row_to_warn_of(tmp_path: Path) -> None:
    _write(file := tmp_path / "metrics.jsonl", 2000)
    rows, kept = read_metrics(file), thinned_metrics(file, num_kept=30)
    assert len(kept) <= 3 * 60 + 100
    assert kept[-100:] == rows[-100:]
    assert kept[0] == rows[0]
    steps = [row["step"] for row in kept[:-100] if "seconds_step" in row and not row.get("env_failures")]
    assert {later - earlier for earlier, later in itertools.pairwise(steps)} <= {64.0, 65.0, 66.0}
    failed = [row["step"] for row in kept if row.get("env_failures")]
    assert failed == [40.0 * number for number in range(1, 51)]
    assert [row for row in rows if row in kept] == kept  # in their order


def test_a_longer_run_needs_no_more_memory(tmp_path: Path) -> None:
    peaks: list[int] = []
    for num_steps in (500, 500, 5000):  # the first one also loads what is loaded once
        _write(file := tmp_path / "metrics.jsonl", num_steps)
        tracemalloc.start()
        thinned_metrics(file, num_kept=50)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 3 * peaks[1]
