import math

from controller.runs.loop_config import ABSENT, differences
from controller.runs.metric_rows import by_step, metric_differences


def test_metrics_that_differ_are_found_and_timings_are_not() -> None:
    ours = by_step(
        [{"step": 0.0, "eval": 0.5}, {"step": 1.0, "loss": 1.0, "seconds_step": 3.0, "time": 1.0, "mfu": 0.1}]
    )
    theirs = by_step(
        [
            {"step": 0.0, "eval": 0.5},
            {"step": 1.0, "loss": 1.5, "seconds_step": 4.0, "time": 2.0, "mfu": 0.2, "staleness_max": 1.0},
            {"step": 2.0, "loss": 7.0},
        ]
    )
    assert metric_differences(ours, ours) == []
    loss, staleness = metric_differences(ours, theirs)
    assert (loss.step, loss.name, loss.values) == (1, "loss", (1.0, 1.5))
    assert math.isclose(loss.relative, 1 / 3)
    assert staleness.name == "staleness_max"
    assert math.isinf(staleness.relative)


def test_numbers_that_are_none_are_the_same() -> None:
    rows = by_step([{"step": 1.0, "grad_norm": math.nan}])
    assert metric_differences(rows, by_step([{"step": 1.0, "grad_norm": math.nan}])) == []
    assert len(metric_differences(rows, by_step([{"step": 1.0, "grad_norm": 1.0}]))) == 1


def test_configurations_differ_by_dotted_field() -> None:
    before, after = {"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 4}, "e": 5}
    assert differences(before, after) == {"a.c": (2, 4), "d": (3, ABSENT), "e": (ABSENT, 5)}
