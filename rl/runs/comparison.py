"""Two runs, step by step: where their configurations and their metrics differ."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

ABSENT = "(absent)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A metric of one step that two runs do not share."""

    step: int
    name: str
    values: tuple[float, float]
    """NaN where a run does not have it."""

    @property
    def relative(self) -> float:
        """|a - b| over the larger of |a| and |b|; infinite if only one of them is a number."""
        a, b = self.values
        if not (math.isfinite(a) and math.isfinite(b)):
            return math.inf
        return abs(a - b) / max(abs(a), abs(b))


def is_timing(name: str) -> bool:
    """Whether a metric is of the machine's doing, so that no two runs share it."""
    return name == "time" or name.startswith(("seconds_", "memory_")) or name.endswith("_per_s")


def by_step(rows: Sequence[Mapping[str, float]]) -> dict[int, dict[str, float]]:
    """Step -> all metrics logged for it."""
    steps: dict[int, dict[str, float]] = {}
    for row in rows:
        steps.setdefault(int(row["step"]), {}).update(row)
    return steps


def metric_differences(
    ours: Mapping[int, Mapping[str, float]], theirs: Mapping[int, Mapping[str, float]]
) -> list[Difference]:
    """Every metric, timings aside, that is not the same in the steps that both have; by step and in logged order."""
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
    """Of two configurations in JSON types: dotted field -> the two values, wherever they are not the same."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        old, new = cast("Mapping[str, Any]", before), cast("Mapping[str, Any]", after)
        found: dict[str, tuple[Any, Any]] = {}
        for key in [*old, *(key for key in new if key not in old)]:
            found |= differences(old.get(key, ABSENT), new.get(key, ABSENT), f"{prefix}.{key}" if prefix else key)
        return found
    return {} if before == after else {prefix: (before, after)}
