"""The picture of `ownloop compare`: held-out rewards of several configurations over the steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from controller.runs.plot import columns, style
from controller.runs.significance import t_quantile

# Paul Tol's "bright" scheme, which is safe for colour-blind readers.
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")


def plot_comparison(curves: Mapping[str, Sequence[Sequence[Mapping[str, float]]]], file: Path) -> None:
    """Draws a PNG. `curves` are the metrics of each run (`read_metrics`), by configuration.

    Each run's held-out reward is a thin line. The mean of a configuration with several runs is a thick one, with its
    95 % interval over runs (Student's t) at the steps at which all of them were evaluated.
    """
    figure = Figure(figsize=(7.2, 4.2), dpi=160, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (name, runs) in enumerate(curves.items()):
        _draw(axes, f"{name} (n = {len(runs)})", runs, _COLOURS[number % len(_COLOURS)])
    style(axes, "held-out reward", "reward")
    axes.legend(frameon=False, fontsize=8, loc="best")
    canvas.print_png(str(file))


def _draw(axes: Axes, label: str, runs: Sequence[Sequence[Mapping[str, float]]], colour: str) -> None:
    """Draws the runs of one configuration."""
    found = [columns(rows, "step", "eval_reward") for rows in runs]
    evaluated = [dict(zip(*run.tolist(), strict=True)) for run in found if run.size]
    several = len(evaluated) > 1
    for number, run in enumerate(evaluated):
        look: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.5} if several else {"linewidth": 2.0, "label": label}
        axes.plot(
            [*run], [*run.values()], "-" if several else "s-", color=colour, markersize=4, zorder=2 + number, **look
        )
    if not several:
        return
    steps = sorted(set.intersection(*(set(run) for run in evaluated)))
    if not steps:  # the runs were evaluated at different steps
        axes.plot([], [], "-", color=colour, label=label)
        return
    rewards = np.array([[run[step] for step in steps] for run in evaluated])  # [runs, steps]
    mean = rewards.mean(axis=0)
    reach = t_quantile(0.975, len(evaluated) - 1) * rewards.std(axis=0, ddof=1) / np.sqrt(len(evaluated))
    axes.fill_between(steps, mean - reach, mean + reach, color=colour, alpha=0.15, linewidth=0)
    axes.plot(steps, mean, "s-", color=colour, linewidth=2.0, markersize=4, label=label, zorder=9)
