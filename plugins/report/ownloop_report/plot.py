"""The plot of a run: its reward, or another metric, in training and on held-out data. Draws to a file only.

matplotlib is loaded with the first drawing: a mistake in a recipe should not have to wait for it.
"""

import gc
import io
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from controller.runs.folder import RunFolder
from controller.runs.metric_rows import Row, metric_rows
from controller.runs.observers import Observer
from ownloop_report.comparison import t_quantile
from rl.algorithms.metrics import num_skipped
from rl.system.disk import write_whole
from rl.system.hardware import hand_back_memory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TRAIN = "#4477aa"  # from Paul Tol's "bright" scheme, which is safe for colour-blind readers
_EVAL = "#cc3311"
_LAST = 100


class CurveDrawer(Observer):
    """Draws the held-out metrics of a run as `reward.png` and the like in its folder, while it runs and at its end.

    Draws in the background, since it takes most of a second.
    """

    def __init__(self, folder: RunFolder, *, seconds_between: float = 30.0) -> None:
        """Draws after an evaluation, but at most once in `seconds_between`, and at the end."""
        super().__init__(folder)
        self.seconds_between = seconds_between
        self._curves: dict[str, str] = {}
        self._drawn_at = -math.inf

    def after_evaluation(self, measured: Mapping[str, str]) -> None:
        """Draws these metrics, each with its metric in training, if it is time."""
        self._curves.update(measured)
        if time.monotonic() - self._drawn_at >= self.seconds_between:
            self._drawn_at = time.monotonic()
            self.folder.in_background(self._draw)

    def finish(self) -> None:
        """Draws all curves."""
        self.folder.in_background(self._draw)

    def _draw(self) -> None:
        folder = self.folder.path
        metrics = thinned_metrics(self.folder.metrics_file) if self._curves else []
        for name, training in [*self._curves.items()]:
            plot_curve(metrics, folder / f"{name}.png", folder.name, name=name, training=training)
        hand_back_garbage()  # a drawing of matplotlib is megabytes of cycles


def hand_back_garbage() -> None:
    """Frees garbage in cycles and hands its memory back: for the end of work that leaves much of it.

    Takes most of a second, in which all threads wait, unless the collector passes over long-lived objects:
    `rl.system.hardware.without_walking_what_exists`.
    """
    gc.collect()
    hand_back_memory()


def plot_curve(
    metrics: Sequence[Mapping[str, float]],
    file: Path,
    title: str,
    *,
    name: str = "reward",
    training: str = "reward_mean",
) -> None:
    """Draws one metric over the steps of a run as a PNG; `metrics` are the rows that `read_metrics` returns.

    The metric `training` of each step is a dot, with a moving average; `eval_<name>` is drawn with its 95 % interval.
    A row may hold either or both. Raises `RecordingError`, with the file as it was.
    """
    figure, axes = _new_figure()
    trained = columns(metrics, "step", training)
    if trained.size:
        steps, mean = trained
        window = max(1, min(len(steps) // 4, 5))
        alpha = 0.45 if window > 1 else 1.0
        axes.plot(steps, mean, "o", color=_TRAIN, markersize=4, alpha=alpha, markeredgewidth=0, label="training step")
        if window > 1:
            label = f"training, mean of {window} steps"
            axes.plot(steps, _moving_average(mean, window), "-", color=_TRAIN, linewidth=1.8, label=label)
    eval_data = columns(metrics, "step", *(f"eval_{name}{end}" for end in ("", "_low", "_high")))
    if eval_data.size:
        steps, mean, low, high = eval_data
        axes.errorbar(
            steps,
            mean,
            yerr=np.clip([mean - low, high - mean], 0, None),
            fmt="s-",
            color=_EVAL,
            markersize=5,
            linewidth=1.2,
            capsize=3,
            label="held-out, 95 % interval",
            zorder=3,
        )
    style(axes, title, name.replace("_", " "))
    if trained.size or eval_data.size:
        axes.legend(frameon=False, fontsize=9, loc="best")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    write_whole(file, drawn.getvalue())


def _new_figure() -> "tuple[Figure, Axes]":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # not of pyplot, which keeps every figure it has made
    figure = Figure(figsize=(7.2, 4.2), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def style(axes: "Axes", title: str, label: str) -> None:
    """Labels the axes and removes frame lines."""
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=11, parse_math=False)  # a run's name may hold dollars
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def columns(metrics: Sequence[Mapping[str, float]], *names: str) -> NDArray[np.float64]:
    """[len(names), rows]: the columns `names` of the rows in which all of them are finite."""
    rows = [
        [row[name] for name in names] for row in metrics if all(np.isfinite(row.get(name, np.nan)) for name in names)
    ]
    return np.array(rows, dtype=np.float64).T


def _moving_average(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """[N] mean of the `window` values around each value; near the ends, of fewer values."""
    kernel = np.ones(window)
    # divided by what the window covers, so ends are not pulled to 0
    return np.convolve(values, kernel, "same") / np.convolve(np.ones_like(values), kernel, "same")


# Paul Tol's "bright" scheme, which is safe for colour-blind readers.
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")


def plot_comparison(curves: Mapping[str, Sequence[Sequence[Mapping[str, float]]]], file: Path) -> None:
    """Draws a PNG. `curves` are the metrics of each run (`read_metrics`), by configuration.

    Each run's held-out reward is a thin line. The mean of a configuration with several runs is a thick one, with its
    95 % interval over runs (Student's t) at the steps at which all of them were evaluated.
    """
    figure, axes = _new_figure()
    for number, (name, runs) in enumerate(curves.items()):
        label = f"{name} (n = {len(runs)})".replace("$", r"\$")  # no formula
        _draw_runs(axes, label, runs, _COLOURS[number % len(_COLOURS)])
    style(axes, "held-out reward", "reward")
    axes.legend(frameon=False, fontsize=8, loc="best")
    figure.savefig(file, format="png")


def _draw_runs(axes: "Axes", label: str, runs: Sequence[Sequence[Mapping[str, float]]], colour: str) -> None:
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
    warned = num_skipped(row) or not math.isfinite(row.get("loss", 0.0)) or row.get("env_failures")
    return "warned" if warned else "step"
