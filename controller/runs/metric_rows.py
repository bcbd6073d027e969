"""Reads `metrics.jsonl`: every row, one after the other, or as many as drawings and warnings need of a long run.

Its rows and `recipe.json` name the schema of the run: the names and forms in its files, and the modules that its saved
recipe imports. A run of another schema is refused.
"""

import json
import math
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, float]

SCHEMA_VERSION = 4
_LAST = 100


def metric_rows(file: Path) -> Iterator[Row]:
    """The rows, without a last line that is still being written; none if there is no such file.

    Numbers that were not finite are NaN. Raises ValueError, naming the file and the line, for a line that is no row,
    and for a run of another schema.
    """
    if not file.exists():  # a run that has not begun
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n"):  # the last line may still be written
                try:
                    row = dict[str, float | None](json.loads(line))
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{file}, line {number}, is damaged: {error}") from None
                check_schema(row, file.parent)
                row.pop("schema_version")  # the same in each row
                # The parser makes each name anew for each row, which would be most of a row's memory.
                yield {sys.intern(name): math.nan if value is None else value for name, value in row.items()}


def check_schema(saved: Mapping[str, Any], run: Path) -> None:
    """Raises ValueError unless a row of `metrics.jsonl`, or `recipe.json`, of the run in this folder has our schema."""
    if (found := saved.get("schema_version", 1)) != SCHEMA_VERSION:
        raise ValueError(
            f"{run} is a run of schema {found}, and this version of ownloop reads runs of schema {SCHEMA_VERSION}; use "
            "the version that began it, or start a new run"
        )


def thinned_metrics(file: Path, num_kept: int = 1000) -> list[Row]:
    """Rows of the whole run, in order, in memory that does not grow with the run.

    These are the last 100 rows, and `num_kept` to twice as many of each of three kinds: steps, steps with something to
    warn of (not finite, skipped, or failures of the environment) and evaluations. Of a kind with more, every second,
    fourth, eighth ... is kept.
    """
    kinds = {kind: _Thinned(2 * num_kept) for kind in ("step", "warned", "evaluation")}  # twice: thinning halves them
    last: deque[tuple[int, Row]] = deque(maxlen=_LAST)
    for numbered in enumerate(metric_rows(file)):
        kinds[_kind(numbered[1])].add(numbered)
        last.append(numbered)
    by_number = dict(last)
    for kind in kinds.values():
        by_number |= kind.rows  # the last rows are always there, at full density
    return [by_number[number] for number in sorted(by_number)]


class _Thinned:
    """Rows of one kind by their numbers, at equal distances, the first among them."""

    def __init__(self, max_rows: int) -> None:
        self.rows: dict[int, Row] = {}
        self._max_rows = max_rows
        self._num_added = 0
        self._stride = 1

    def add(self, numbered: tuple[int, Row]) -> None:
        if self._num_added % self._stride == 0:  # every `_stride`-th
            self.rows[numbered[0]] = numbered[1]
            if len(self.rows) > self._max_rows:
                self.rows = dict([*self.rows.items()][::2])  # every other one goes
                self._stride *= 2
        self._num_added += 1


def _kind(row: Row) -> str:
    if "seconds_step" not in row:
        return "evaluation"
    warned = row.get("skipped") or not math.isfinite(row.get("loss", 0.0)) or row.get("env_failures")
    return "warned" if warned else "step"
