"""Reads `metrics.jsonl`: every row, one after the other, or as many as drawings and warnings need of a long run."""

import json
import math
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

Row = dict[str, float]

_LAST = 100


def metric_rows(file: Path) -> Iterator[Row]:
    """The rows, without a last line that is still being written; none if there is no such file.

    Raises ValueError, naming the file and the line, for a line that is no row.

    Rows of an earlier schema version come under the names of the current one. Numbers that were not finite are NaN.
    """
    if not file.exists():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n"):
                try:
                    row: dict[str, float | None] = current_metrics(json.loads(line))
                except (ValueError, AttributeError, TypeError) as error:
                    raise ValueError(f"{file}, line {number}, is damaged: {error}") from None
                # The parser makes each name anew for each row, which would be most of a row's memory.
                yield {sys.intern(name): math.nan if value is None else value for name, value in row.items()}


def thinned_metrics(file: Path, num_kept: int = 1000) -> list[Row]:
    """Rows of the whole run, in order, in memory that does not grow with the run.

    These are the last 100 rows, and `num_kept` to twice as many of each of three kinds: steps, steps with something to
    warn of (not finite, skipped, or failures of the environment) and evaluations. Of a kind with more, every second,
    fourth, eighth ... is kept.
    """
    kinds = {kind: _Thinned(2 * num_kept) for kind in ("step", "warned", "evaluation")}
    last: deque[tuple[int, Row]] = deque(maxlen=_LAST)
    for numbered in enumerate(metric_rows(file)):
        kinds[_kind(numbered[1])].add(numbered)
        last.append(numbered)
    by_number = dict(last)
    for kind in kinds.values():
        by_number |= kind.rows
    return [by_number[number] for number in sorted(by_number)]


class _Thinned:
    """Rows of one kind by their numbers, at equal distances, the first among them."""

    def __init__(self, max_rows: int) -> None:
        self.rows: dict[int, Row] = {}
        self._max_rows = max_rows
        self._num_added = 0
        self._stride = 1

    def add(self, numbered: tuple[int, Row]) -> None:
        if self._num_added % self._stride == 0:
            self.rows[numbered[0]] = numbered[1]
            if len(self.rows) > self._max_rows:
                self.rows = dict([*self.rows.items()][::2])
                self._stride *= 2
        self._num_added += 1


def _kind(row: Row) -> str:
    if "seconds_step" not in row:
        return "evaluation"
    warned = row.get("skipped") or not math.isfinite(row.get("loss", 0.0)) or row.get("env_failures")
    return "warned" if warned else "step"


SCHEMA_VERSION = 3

_METRICS = {
    "logprob_gap_mean": "logprob_mismatch_mean",
    "logprob_gap_max": "logprob_mismatch_max",
    "lag_mean": "staleness_mean",
    "lag_max": "staleness_max",
    "kl_sampler": "kl_generator",
}
_EVAL_PREFIXES = ("heldout_", "eval_")
_FIELDS = {
    "num_heldout": "num_eval",
    "heldout_samples": "eval_samples",
    "samples_per_prompt": "group_size",
    "max_policy_lag": "max_staleness",
    "credit": "ppo",
    "on_death": "on_failure",
}
_VALUES = {"on_failure": {"resend": "retry"}}


def schema_version(saved: Mapping[str, Any]) -> int:
    """The version that a row of `metrics.jsonl`, or `recipe.json`, was written in."""
    return int(saved.get("schema_version", 1))


def current_metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `metrics.jsonl` under the names of the current version, without `schema_version`."""
    metrics = {name: value for name, value in row.items() if name != "schema_version"}
    if schema_version(row) >= 2:
        return metrics
    old, new = _EVAL_PREFIXES
    return {
        new + name.removeprefix(old) if name.startswith(old) else _METRICS.get(name, name): value
        for name, value in metrics.items()
    }


def current_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The object of a `config.json`, of any version, under the field names of the current one."""
    fields: dict[str, Any] = {}
    for old, value in config.items():
        name = _FIELDS.get(old, old)
        nested = current_fields(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else value
        fields[name] = _VALUES.get(name, {}).get(nested, nested) if isinstance(nested, str) else nested
    return fields
