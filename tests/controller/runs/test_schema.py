"""A run's files name their schema, and every reader refuses another one in one sentence that names both."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from controller.commands.resume import recording_file, saved_recipe
from controller.commands.show import Show
from controller.runs.folder import RunFolder, read_metrics
from tests.controller.runs.other_schemas import OTHER_SCHEMAS, run_of_schema


@pytest.mark.parametrize(
    "read",
    [
        lambda run: read_metrics(run / "metrics.jsonl"),
        lambda run: Show(recipe=str(run), runs=run).run(),
        recording_file,
        saved_recipe,
    ],
    ids=["metrics", "show", "replay", "resume"],
)
@pytest.mark.parametrize(("schema", "found"), OTHER_SCHEMAS)
def test_another_schema_is_refused(
    read: Callable[[Path], object], schema: int | None, found: int, tmp_path: Path
) -> None:
    with pytest.raises(
        ValueError, match=f"/a is a run of schema {found}, and this version of ownloop reads .* schema 4;"
    ):
        read(run_of_schema(tmp_path / "a", schema))


def test_a_row_names_the_schema_and_keeps_its_names(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", {})
    folder.log_metrics({"step": 1.0, "lag_mean": 0.5})  # an environment's own metric
    assert json.loads(folder.metrics_file.read_text())["schema_version"] == 4
    (row,) = folder.metrics()
    assert row.keys() == {"step", "lag_mean", "time"}
