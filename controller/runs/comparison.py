"""Two runs, step by step: where their configurations and their metrics differ."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

ABSENT = "(absent)"
"""Stands for the value of a field that one configuration lacks."""


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
        return abs(a - b) / max(abs(a), abs(b))


def is_timing(name: str) -> bool:
    """Whether a metric depends on the machine and the moment, so that equal runs differ in it."""
    return name in ("time", "mfu") or name.startswith(("seconds_", "memory_")) or name.endswith("_per_s")


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


def differences(before: Any, after: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted field -> the two values, for all fields in which two configurations (in JSON types) differ."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        old, new = cast("Mapping[str, Any]", before), cast("Mapping[str, Any]", after)
        found: dict[str, tuple[Any, Any]] = {}
        for key in [*old, *(key for key in new if key not in old)]:
            found |= differences(old.get(key, ABSENT), new.get(key, ABSENT), f"{prefix}.{key}" if prefix else key)
        return found
    return {} if before == after else {prefix: (before, after)}
