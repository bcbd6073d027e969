"""`ownloop compare RUN RUN ...`: two runs step by step; several, over their seeds; with `--plot`, as a picture.

Over seeds, runs are put together that differ in nothing else. A table shows their final rewards, and Welch's t-test
says what can be claimed.
"""

import shutil
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from controller.commands.command import OfRuns
from controller.commands.saved_recipe import find_run
from controller.runs.folder import CONFIG_FILE, METRICS, read_json, read_metrics
from controller.runs.loop_config import differences
from controller.runs.metric_rows import Difference, by_step, last_row_with, metric_differences
from ownloop_report.comparison import (
    Configuration,
    FinalReward,
    final_reward,
    named_differences,
    same_configuration,
    welch,
)

_SHOWN = ("reward_mean", "eval_reward", "loss", "grad_norm", "seconds_step")
_MOST_STEPS = 40  # that a table shows: the first, the last and those between at equal distances
_WIDTH = 80  # of a page that is not a terminal
_SIGNIFICANT = 0.05
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, kw_only=True)
class Compare(OfRuns):
    """Compares runs: two of them step by step, and final rewards over seeds."""

    names: Annotated[tuple[str, ...], Positional, arg(metavar="RUN RUN ...")]
    """Two or more runs: their folders, or their names within --runs."""
    plot: Annotated[Path | None, arg(metavar="FILE.png")] = None
    """Also draw the held-out rewards over the steps."""

    def __post_init__(self) -> None:
        """Raises ValueError for a picture that is no PNG."""
        if self.plot is not None and self.plot.suffix != ".png":
            raise ValueError(f"--plot is {self.plot}; the file's name must end in .png")

    def run(self) -> int:
        """Prints the comparison, and draws it if asked to."""
        runs = [find_run(name, self.runs) for name in self.names]
        if len(runs) < 2:
            raise ValueError(f"compare was given {'one run' if runs else 'no run'}; it needs at least two")
        width = max(40, shutil.get_terminal_size((_WIDTH, 24)).columns)
        if len(runs) == 2:
            _print(comparison(runs[0], runs[1], width), width)
        # Two runs with the same seed are compared to see whether they are equal; over seeds there is nothing to judge.
        if len(runs) > 2 or self.plot or (all(map(_is_evaluated, runs)) and not are_repeats(*runs)):
            configurations = configurations_of(runs)
            _print(judgement(configurations), width)
            if self.plot is not None:
                draw_comparison(configurations, self.plot)
                _print([f"drawn in {self.plot}"], width)
        return 0


def _print(lines: Iterable[str], width: int) -> None:
    """Prints lines, each folded at the width of the page; what is left of a folded line is indented."""
    for line in lines:
        print(
            textwrap.fill(line, width, subsequent_indent="   ", break_on_hyphens=False) if len(line) > width else line
        )


def _is_evaluated(run: Path) -> bool:
    return last_row_with(run / METRICS, "eval_reward") is not None


def draw_comparison(configurations: Sequence[Configuration], file: Path) -> None:
    """Draws the held-out reward of all runs over the steps."""
    from ownloop_report.plot import plot_comparison  # loads matplotlib

    curves = {
        configuration.name: [read_metrics(Path(run.run) / METRICS) for run in configuration.runs]
        for configuration in configurations
    }
    plot_comparison(curves, file)


def comparison(run_a: Path, run_b: Path, width: int = _WIDTH) -> Iterable[str]:
    """The lines to print: fields that differ, each step's main metrics in pairs, and where the metrics first differ.

    The lines of tables have at most `width` characters: metrics that do not fit follow in tables of their own.
    """
    configs = [read_json(run / CONFIG_FILE) for run in (run_a, run_b)]
    yield f"A  {run_a}"
    yield f"B  {run_b}"
    for field, (a, b) in differences(configs[0], configs[1]).items():
        yield f"{field}: {a!r} in A, {b!r} in B"
    ours, theirs = (by_step(read_metrics(run / METRICS)) for run in (run_a, run_b))
    shown = [name for name in _SHOWN if any(name in row for row in (*ours.values(), *theirs.values()))]
    found, steps = metric_differences(ours, theirs), sorted(ours.keys() | theirs.keys())
    if (num_steps := len(steps)) > _MOST_STEPS:
        some = {steps[i * (num_steps - 1) // (_MOST_STEPS - 2)] for i in range(_MOST_STEPS - 1)}
        steps = sorted(some | {found[0].step} if found else some)
    pairs = [
        _pair(name, [ours.get(step, {}) for step in steps], [theirs.get(step, {}) for step in steps]) for name in shown
    ]
    yield from _tables([f"{'step':>6}", *(f"{step:>6}" for step in steps)], pairs, width)
    if len(steps) < num_steps:
        yield f"{len(steps)} of {num_steps} steps are shown; the next sentence is about all."
    yield _verdict(ours.keys() & theirs.keys(), found)


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


def _verdict(both: Collection[int], found: Sequence[Difference]) -> str:
    """One sentence: where the metrics first differ, and where they differ most."""
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


def configurations_of(runs: Sequence[Path]) -> list[Configuration]:
    """The runs, put together where they differ in their seeds only, in the order given.

    Each configuration is named by its values of all fields in which they differ; a single one has the name of its first
    run. Raises ValueError for a run without an evaluation, and for two runs of one configuration with the same seed:
    they say no more than one.
    """
    configs: list[Mapping[str, object]] = []
    members: list[list[FinalReward]] = []
    for run in runs:
        config = _config(run)
        place = next((i for i, known in enumerate(configs) if same_configuration(known, config)), len(configs))
        if place == len(configs):
            configs.append(config)
            members.append([])
        result = final_reward(str(run), config, read_metrics(run / METRICS))
        if same := [other.run for other in members[place] if other.seed == result.seed]:
            raise ValueError(
                f"{run} and {same[0]} have the same configuration and the same seed, {result.seed}; a comparison over "
                "seeds needs different ones"
            )
        members[place].append(result)
    names = _names(configs) or [Path(members[0][0].run).name]
    return [Configuration(name=name, runs=tuple(results)) for name, results in zip(names, members, strict=True)]


def are_repeats(one: Path, other: Path) -> bool:
    """Whether two runs have the same configuration and the same seed."""
    ours, theirs = _config(one), _config(other)
    return same_configuration(ours, theirs) and ours.get("seed") == theirs.get("seed")


def _config(run: Path) -> Mapping[str, object]:
    return read_json(run / CONFIG_FILE)


def _names(configs: Sequence[Mapping[str, object]]) -> list[str]:
    """The values that each configuration has of the fields in which they differ; none for a single configuration."""
    found = [named_differences(configs[0], config) for config in configs[1:]]
    fields = {field: pair[0] for differing in found for field, pair in differing.items()}
    of_each = [fields, *({**fields, **{field: pair[1] for field, pair in d.items()}} for d in found)]
    return [", ".join(f"{field} {value!r}" for field, value in values.items()) for values in of_each if fields]


def judgement(configurations: Sequence[Configuration]) -> Iterable[str]:
    """The lines to print: each configuration's final rewards, and how each differs from the first."""
    yield "final held-out reward:"
    for letter, configuration in zip(_LETTERS, configurations, strict=False):
        rewards = configuration.rewards
        values = ", ".join(f"{run.reward:.3f} (seed {run.seed}, step {run.step})" for run in configuration.runs)
        yield f"{letter}  {configuration.name}: mean {sum(rewards) / len(rewards):.3f}, n = {len(rewards)}: {values}"
    steps = {run.step for configuration in configurations for run in configuration.runs}
    if len(steps) > 1:
        yield f"The last evaluations are after different numbers of steps, {min(steps)} to {max(steps)}."
    first, *others = configurations
    for letter, other in zip(_LETTERS[1:], others, strict=False):
        yield _claim(letter, other, first)


def _claim(letter: str, other: Configuration, first: Configuration) -> str:
    """What can be said about the difference between a configuration and the first."""
    counts = len(other.runs), len(first.runs)
    if min(counts) < 2:
        return (
            f"{letter} - A: nothing can be claimed from {counts[0]} and {counts[1]} seeds, since each side needs at "
            "least two; `ownloop sweep RECIPE --seed 0 1 2` runs several."
        )
    difference = welch(other.rewards, first.rewards)
    interval = difference.interval
    significant = "significant" if difference.p_value < _SIGNIFICANT else "not significant"
    return (
        f"{letter} - A: {interval.mean:+.3f}, 95 % interval [{interval.low:+.3f}, {interval.high:+.3f}], "
        f"p = {difference.p_value:.3g} (Welch's t-test over {counts[0]} and {counts[1]} seeds): {significant} at 5 %."
    )
