"""A run's files name their schema, and every reader refuses another one in one sentence that names both."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from controller.commands.resume import recording_file, saved_recipe
from controller.commands.show import Show
from controller.runs.folder import RunFolder, read_metrics
from ownloop_doctors.compare import comparison
from ownloop_report.page import write_report


def _run(path: Path, schema: int | None) -> Path:
    """A run's folder whose files name this schema, or none."""
    named = {} if schema is None else {"schema_version": schema}
    folder = RunFolder(path, {"seed": 0})
    folder.metrics_file.write_text(json.dumps({"step": 1.0, "loss": 0.5, **named}) + "\n")
    (path / "recipe.json").write_text(json.dumps({"source": "", **named}))
    folder.close()
    return path


@pytest.mark.parametrize(
    "read",
    [
        lambda run: read_metrics(run / "metrics.jsonl"),
        lambda run: [*comparison(run, run)],
        lambda run: Show(recipe=str(run), runs=run).run(),
        recording_file,
        saved_recipe,
        write_report,
    ],
    ids=["metrics", "compare", "show", "replay", "resume", "report"],
)
@pytest.mark.parametrize(("schema", "found"), [(3, 3), (5, 5), (None, 1)])
def test_another_schema_is_refused(
    read: Callable[[Path], object], schema: int | None, found: int, tmp_path: Path
) -> None:
    with pytest.raises(
        ValueError, match=f"/a is a run of schema {found}, and this version of ownloop reads .* schema 4;"
    ):
        read(_run(tmp_path / "a", schema))


def test_a_row_names_the_schema_and_keeps_its_names(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", {})
    folder.log_metrics({"step": 1.0, "lag_mean": 0.5})  # an environment's own metric
    assert json.loads(folder.metrics_file.read_text())["schema_version"] == 4
    (row,) = folder.metrics()
    assert row.keys() == {"step", "lag_mean", "time"}
