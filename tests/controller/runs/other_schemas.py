"""Folders of runs whose files name another schema, or none."""

import json
from pathlib import Path

from controller.runs.folder import RunFolder

OTHER_SCHEMAS = ((3, 3), (5, 5), (None, 1))
"""What the files name, and what is found."""


def run_of_schema(path: Path, schema: int | None) -> Path:
    """A run's folder whose files name this schema, or none."""
    named = {} if schema is None else {"schema_version": schema}
    folder = RunFolder(path, {"seed": 0})
    folder.metrics_file.write_text(json.dumps({"step": 1.0, "loss": 0.5, **named}) + "\n")
    (path / "recipe.json").write_text(json.dumps({"source": "", **named}))
    folder.close()
    return path
