"""Reads `metrics.jsonl`: every row, one after the other.

Its rows and `recipe.json` name the schema of the run: the names and forms in its files, and the modules that its saved
recipe imports. A run of another schema is refused.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, float]

SCHEMA_VERSION = 4


def metric_rows(file: Path) -> Iterator[Row]:
    """The rows, without a last line that is still being written; none if there is no such file.

    Numbers that were not finite are NaN. Raises ValueError, naming the file and the line, for a line that is no row,
    and for a run of another schema.
    """
    if not file.exists():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n"):
                try:
                    row = dict[str, float | None](json.loads(line))
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{file}, line {number}, is damaged: {error}") from None
                check_schema(row, file.parent)
                row.pop("schema_version")
                # The parser makes each name anew for each row, which would be most of a row's memory.
                yield {sys.intern(name): math.nan if value is None else value for name, value in row.items()}


def check_schema(saved: Mapping[str, Any], run: Path) -> None:
    """Raises ValueError unless a row of `metrics.jsonl`, or `recipe.json`, of the run in this folder has our schema."""
    if (found := saved.get("schema_version", 1)) != SCHEMA_VERSION:
        raise ValueError(
            f"{run} is a run of schema {found}, and this version of ownloop reads runs of schema {SCHEMA_VERSION}; use "
            "the version that began it, or start a new run"
        )
