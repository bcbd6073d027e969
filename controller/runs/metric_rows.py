"""Reads `metrics.jsonl`: every row, one after the other; and compares the rows of two runs.

Its rows and `recipe.json` name the schema of the run: the names and forms in its files, and the modules that its saved
recipe imports. A run of another schema is refused.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from mmap import ACCESS_READ, mmap
from pathlib import Path

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
                yield _row(line, partial("{}, line {}".format, file, number), file.parent)


def last_row_with(file: Path, name: str = "") -> Row | None:
    """The last row, or the last row that has a metric; None if there is none. Parses no other row of the file.

    Raises ValueError as `metric_rows` does.
    """
    if not file.exists() or not file.stat().st_size:
        return None
    with file.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as text:
        whole = text.rfind(b"\n")
        place = text.rfind(f'"{name}":'.encode(), 0, whole + 1) if name else whole
        if place < 0:
            return None
        start, end = text.rfind(b"\n", 0, place) + 1, text.find(b"\n", place) + 1
        return _row(text[start:end], lambda: f"{file}, line {text[:start].count(bytes([10])) + 1}", file.parent)


def _row(line: bytes, where: Callable[[], str], run: Path) -> Row:
    try:
        row = dict[str, float | None](json.loads(line))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where()}, is damaged: {error}") from None
    check_schema(row, run)
    row.pop("schema_version")
    # The parser makes each name anew for each row, which would be most of a row's memory.
    return {sys.intern(name): math.nan if value is None else value for name, value in row.items()}


def check_schema(saved: Mapping[str, object], run: Path) -> None:
    """Raises ValueError unless a row of `metrics.jsonl`, or `recipe.json`, of the run in this folder has our schema."""
    if (found := saved.get("schema_version", 1)) != SCHEMA_VERSION:
        raise ValueError(
            f"{run} is a run of schema {found}, and this version of ownloop reads runs of schema {SCHEMA_VERSION}; use "
            "the version that began it, or start a new run"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A metric of one step that differs between two runs."""

    step: int
    name: str
    values: tuple[float, float]
    """The metric in each run; NaN if the run does not have it."""

    @property
    def relative(self) -> float:
        """|a - b| divided by the larger of |a| and |b|; infinite unless both are finite."""
        a, b = self.values
        if not (math.isfinite(a) and math.isfinite(b)):
            return math.inf
        return abs(a - b) / max(abs(a), abs(b))  # symmetric, so the order of runs does not matter


def is_timing(name: str) -> bool:
    """Whether a metric depends on the machine and the moment, so that equal runs differ in it."""
    return name in ("time", "mfu") or name.startswith(("seconds_", "memory_", "engine_")) or name.endswith("_per_s")


def by_step(rows: Sequence[Mapping[str, float]]) -> dict[int, dict[str, float]]:
    """Step -> all metrics logged for it."""
    steps: dict[int, dict[str, float]] = {}
    for row in rows:
        steps.setdefault(int(row["step"]), {}).update(row)
    return steps


def metric_differences(
    ours: Mapping[int, Mapping[str, float]], theirs: Mapping[int, Mapping[str, float]]
) -> list[Difference]:
    """The metrics, other than timings, that differ in the common steps, by step and in the order logged."""
    found: list[Difference] = []
    for step in sorted(ours.keys() & theirs.keys()):
        a, b = ours[step], theirs[step]
        for name in [*a, *(name for name in b if name not in a)]:
            values = (a.get(name, math.nan), b.get(name, math.nan))
            both_nan = name in a and name in b and all(map(math.isnan, values))
            if not is_timing(name) and values[0] != values[1] and not both_nan:
                found.append(Difference(step=step, name=name, values=values))
    return found
