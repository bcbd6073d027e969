"""`ownloop compare RUN RUN ...`: two runs step by step; several, over their seeds; with `--plot`, as a picture."""

import argparse
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from controller.commands.command import Commands, add_runs_option, refuse

if TYPE_CHECKING:  # the import would load NumPy
    from controller.runs.comparison import Configuration

_SHOWN = ("reward_mean", "eval_reward", "loss", "grad_norm", "seconds_step")
_WIDTH = 80  # of a page that is not a terminal


def add_parser(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "compare", help="compare runs: two of them step by step, and final rewards over seeds", allow_abbrev=False
    )
    parser.add_argument("run_names", nargs="+", metavar="RUN", help="a run's folder, or its name within --runs")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw the held-out rewards over the steps")
    add_runs_option(parser)
    parser.set_defaults(command=compare)


def compare(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints the comparison, and draws it if asked to."""
    from controller.commands.compare_seeds import are_repeats, configurations_of, judgement
    from controller.commands.resume import find_run

    refuse(overrides)
    runs = [find_run(name, options.runs) for name in options.run_names]
    if len(runs) < 2:
        raise ValueError("compare was given one run; it needs at least two")
    if options.plot is not None and options.plot.suffix != ".png":
        raise ValueError(f"--plot is {options.plot}; the file's name must end in .png")
    width = max(40, shutil.get_terminal_size((_WIDTH, 24)).columns)
    if len(runs) == 2:
        _print(comparison(runs[0], runs[1], width), width)
    # Two runs with the same seed are compared to see whether they are equal; over seeds there is nothing to judge.
    if len(runs) > 2 or options.plot or (all(map(_is_evaluated, runs)) and not are_repeats(*runs)):
        configurations = configurations_of(runs)
        _print(judgement(configurations), width)
        if options.plot is not None:
            draw_comparison(configurations, options.plot)
            _print([f"drawn in {options.plot}"], width)
    return 0


def _print(lines: Iterable[str], width: int) -> None:
    """Prints lines, each folded at the width of the page; what is left of a folded line is indented."""
    for line in lines:
        print(
            textwrap.fill(line, width, subsequent_indent="   ", break_on_hyphens=False) if len(line) > width else line
        )


def _is_evaluated(run: Path) -> bool:
    from controller.runs.folder import read_metrics

    return any("eval_reward" in row for row in read_metrics(run / "metrics.jsonl"))


def draw_comparison(configurations: Sequence["Configuration"], file: Path) -> None:
    """Draws the held-out reward of all runs over the steps."""
    from controller.runs.folder import read_metrics
    from controller.runs.plot import plot_comparison  # loads matplotlib

    curves = {
        configuration.name: [read_metrics(Path(run.run) / "metrics.jsonl") for run in configuration.runs]
        for configuration in configurations
    }
    plot_comparison(curves, file)


def comparison(run_a: Path, run_b: Path, width: int = _WIDTH) -> Iterable[str]:
    """The lines to print: fields that differ, each step's main metrics in pairs, and where the metrics first differ.

    The lines of tables have at most `width` characters: metrics that do not fit follow in tables of their own.
    """
    from controller.runs.comparison import by_step, differences
    from controller.runs.folder import CONFIG_FILE, read_metrics
    from rl.system.disk import read_json

    configs = [read_json(run / CONFIG_FILE) for run in (run_a, run_b)]
    yield f"A  {run_a}"
    yield f"B  {run_b}"
    for field, (a, b) in differences(configs[0], configs[1]).items():
        yield f"{field}: {a!r} in A, {b!r} in B"
    ours, theirs = (by_step(read_metrics(run / "metrics.jsonl")) for run in (run_a, run_b))
    shown = [name for name in _SHOWN if any(name in row for row in (*ours.values(), *theirs.values()))]
    steps = sorted(ours.keys() | theirs.keys())
    pairs = [
        _pair(name, [ours.get(step, {}) for step in steps], [theirs.get(step, {}) for step in steps]) for name in shown
    ]
    yield from _tables([f"{'step':>6}", *(f"{step:>6}" for step in steps)], pairs, width)
    yield _verdict(ours, theirs)


def _pair(name: str, ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> list[str]:
    """The two columns of a metric: their heading, and a text for each step, all of the same length."""
    texts = ([f"{row[name]:.6g}" if name in row else "-" for row in rows] for rows in (ours, theirs))
    a, b = ([heading, *column] for heading, column in zip((f"{name} A", "B"), texts, strict=True))
    widths = max(map(len, a)), max(map(len, b))
    return [f"  {left:>{widths[0]}}  {right:>{widths[1]}}" for left, right in zip(a, b, strict=True)]


def _tables(first: Sequence[str], blocks: Sequence[Sequence[str]], width: int) -> Iterable[str]:
    """The lines of tables that begin with the column `first` and have as many of the blocks as fit, in order."""
    lines, empty = [*first], True
    for block in blocks:
        if not empty and len(lines[0]) + len(block[0]) > width:
            yield from lines
            lines = [*first]
        lines, empty = [line + cell for line, cell in zip(lines, block, strict=True)], False
    yield from lines


def _verdict(ours: Mapping[int, Mapping[str, float]], theirs: Mapping[int, Mapping[str, float]]) -> str:
    """One sentence: where the metrics first differ, and where they differ most."""
    from controller.runs.comparison import metric_differences

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
