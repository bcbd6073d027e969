"""`ownloop compare RUN_A RUN_B`: two runs side by side, for a reader."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from rl.runs.comparison import by_step, differences, metric_differences
from rl.runs.folder import CONFIG_FILE, read_metrics

_SHOWN = ("reward_mean", "eval_reward", "loss", "grad_norm", "seconds_step")
_WIDTH = 12


def comparison(run_a: Path, run_b: Path) -> Iterable[str]:
    """Lines: what is configured otherwise, every step's main metrics as a pair, and where the metrics first part."""
    configs = [json.loads((run / CONFIG_FILE).read_text(encoding="utf-8")) for run in (run_a, run_b)]
    yield f"A  {run_a}"
    yield f"B  {run_b}"
    for field, (a, b) in differences(*configs).items():
        yield f"{field}: {a!r} in A, {b!r} in B"
    ours, theirs = (by_step(read_metrics(run / "metrics.jsonl")) for run in (run_a, run_b))
    shown = [name for name in _SHOWN if any(name in row for row in (*ours.values(), *theirs.values()))]
    yield "".join([f"{'step':>6}", *(f"  {name + ' A':>{2 * _WIDTH - 2}}{'B':>{_WIDTH}}" for name in shown)])
    for step in sorted(ours.keys() | theirs.keys()):
        pairs = (f"  {_pair(ours.get(step, {}), theirs.get(step, {}), name)}" for name in shown)
        yield "".join([f"{step:>6}", *pairs])
    yield _verdict(ours, theirs)


def _pair(ours: Mapping[str, float], theirs: Mapping[str, float], name: str) -> str:
    a, b = (f"{row[name]:.6g}" if name in row else "-" for row in (ours, theirs))
    return f"{a:>{2 * _WIDTH - 2}}{b:>{_WIDTH}}"


def _verdict(ours: Mapping[int, Mapping[str, float]], theirs: Mapping[int, Mapping[str, float]]) -> str:
    """One sentence."""
    both, found = ours.keys() & theirs.keys(), metric_differences(ours, theirs)
    if not both:
        return "The runs have no step in common."
    if not found:
        return f"All metrics of the {len(both)} steps that both have are the same, timings aside."
    first = found[0]
    step = [f"{d.name} {d.values[0]:.9g} and {d.values[1]:.9g}" for d in found if d.step == first.step]
    largest = max(found, key=lambda d: d.relative)
    return (
        f"The runs first differ at step {first.step}: {', '.join(step)}. The largest difference is that of "
        f"{largest.name} at step {largest.step}: {largest.values[0]:.9g} and {largest.values[1]:.9g}."
    )
