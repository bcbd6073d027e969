"""`ownloop compare RUN_A RUN_B`: two runs side by side, step by step."""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from controller.commands.command import Commands, add_runs_option, refuse

_SHOWN = ("reward_mean", "eval_reward", "loss", "grad_norm", "seconds_step")
_WIDTH = 12


def add_parser(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("compare", help="print two runs side by side, step by step", allow_abbrev=False)
    parser.add_argument("run_a", metavar="RUN_A", help="a run's folder, or its name within --runs")
    parser.add_argument("run_b", metavar="RUN_B")
    add_runs_option(parser)
    parser.set_defaults(command=compare)


def compare(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints the comparison."""
    from controller.commands.resume import find_run

    refuse(overrides)
    for line in comparison(find_run(options.run_a, options.runs), find_run(options.run_b, options.runs)):
        print(line)
    return 0


def comparison(run_a: Path, run_b: Path) -> Iterable[str]:
    """The lines to print: fields that differ, each step's main metrics in pairs, and where the metrics first differ."""
    from rl.runs.comparison import by_step, differences
    from rl.runs.folder import CONFIG_FILE, read_metrics
    from rl.runs.schema import current_fields

    configs = [current_fields(json.loads((run / CONFIG_FILE).read_text(encoding="utf-8"))) for run in (run_a, run_b)]
    yield f"A  {run_a}"
    yield f"B  {run_b}"
    for field, (a, b) in differences(configs[0], configs[1]).items():
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
    """One sentence: where the metrics first differ, and where they differ most."""
    from rl.runs.comparison import metric_differences

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
