"""The user's view of a run: a progress bar, a line per step, evaluations, samples and one sentence at the end.

On a terminal the bar is live. Elsewhere every event is a plain line. The console knows the names of metrics but
computes none.
"""

import contextlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

import rich.console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from rl.rollouts.evaluation import Evaluation, Interval, Measurement
from rl.types import Group

_PLAIN_WIDTH = 80  # of lines of steps, where the stream is no terminal and COLUMNS does not say otherwise
_BAR_WIDTH = 12
_SECONDS_BETWEEN = 10.0
_MAX_SAMPLE_CHARACTERS = 600


class _RichConsole(rich.console.Console):
    """Lets the command line handle a closed pipe, on which rich itself would exit."""

    def on_broken_pipe(self) -> None:
        """Raises BrokenPipeError from the print that failed."""
        raise BrokenPipeError("the output is not read any more")


class Console:
    """Writes to one stream, usually the terminal. `controller.commands.output` keeps other output away from it."""

    def __init__(self, stream: TextIO, *, seconds_between: float = _SECONDS_BETWEEN) -> None:
        """The progress bar is live if `stream` is a terminal.

        Elsewhere a line says how far work has got, at most once in `seconds_between`.
        """
        self._live = stream.isatty()
        columns = os.environ.get("COLUMNS", "")
        width = None if self._live else int(columns) if columns.isdecimal() and int(columns) else _PLAIN_WIDTH
        # In a notebook, rich would show each line as a piece of HTML, and write nothing to the stream.
        self._rich = _RichConsole(
            file=stream, highlight=False, width=width, soft_wrap=not self._live, force_jupyter=False
        )
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=_BAR_WIDTH),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._rich,
            transient=True,
            disable=not self._live,
            redirect_stdout=False,  # output of other code does not belong on the terminal
            redirect_stderr=False,
        )
        self._task: TaskID | None = None
        self._part: TaskID | None = None  # the second bar, of work that `progress` shows
        self._stepped = False
        self._seconds_between = seconds_between
        self._shown_at = (-math.inf, "")  # when `progress` was last called for another text or has printed a line
        self._started = time.monotonic()

    def phase(self, text: str) -> None:
        """Shows what the run is doing before the first step, or between steps."""
        if self._live:
            self._show(text)
        else:
            self._print(Text(f"[{self._clock()}] {text}"))

    def progress(self, text: str, done: int, total: int) -> None:
        """Shows how far work has got: a second bar, until all is done, or a line now and then."""
        if not self._live:
            now, (then, before) = time.monotonic(), self._shown_at
            if text != before or now >= then + self._seconds_between:
                self._shown_at = now, text
                if done:
                    self._print(Text(f"[{self._clock()}] {text}: {_count(done, total)}"))
            return
        if self._part is not None and (done == total or text != self._shown_at[1]):
            self._progress.remove_task(self._part)
            self._part = None
        self._shown_at = 0.0, text
        if done == total:
            if not self._stepped:
                self._show("before the first step")
            return
        if self._part is None:
            self._progress.start()
            self._part = self._progress.add_task(text, total=total, completed=done, count=_count(done, total))
        self._progress.update(self._part, completed=done, count=_count(done, total))

    def note(self, text: str) -> None:
        """Shows a line that stays, on a terminal too."""
        self._print(Text(text))

    def step(self, metrics: Mapping[str, float], total_steps: int) -> None:
        """Shows a finished step. `metrics["step"]` counts finished steps; missing metrics are left out."""
        done, self._stepped = int(metrics["step"]), True
        self._print(step_line(metrics, total_steps, self._rich.width))
        self._show("training", done, total_steps)

    def evaluation(self, label: str, evaluation: Evaluation) -> None:
        """Shows the reward on held-out problems; `label` says when ("before training", "after 10 steps")."""
        for prefix, part in evaluation.sets.items():
            for name, interval in part.intervals.items():
                self._held_out(f"{prefix}{name}", label, interval, ".3f", f"{len(part.groups)} problems")

    def measurements(self, label: str, measured: Mapping[str, Measurement]) -> None:
        """Shows measurements on held-out data, by name; `label` as in `evaluation`."""
        for name, measurement in measured.items():
            self._held_out(name, label, measurement.interval, ".4g", f"{len(measurement.values)} items")

    def _held_out(self, name: str, label: str, interval: Interval, form: str, size: str) -> None:
        line = Text(f"held-out {name.replace('_', ' ')} {label}: ", style="bold")
        line.append(format(interval.mean, form), style="bold green")
        line.append(f"  95 % interval [{interval.low:{form}}, {interval.high:{form}}], {size}")
        self._print(line)

    def samples(self, groups: Sequence[Group]) -> None:
        """Shows the first rollout of each group: prompt, completion, reward."""
        for number, group in enumerate(groups, start=1):
            if not group.rollouts:
                continue
            rollout = group.rollouts[0]
            self._print(Text(f"sample {number}, reward {rollout.reward:.2f}", style="bold"))
            self._print(Text(_indent("prompt      ", group.prompt), style="dim"))
            self._print(Text(_indent("completion  ", rollout.text)))

    def warn(self, text: str) -> None:
        """Shows a problem that does not end the run."""
        self._print(Text(f"warning: {text}", style="yellow"))

    def done(self, sentence: str) -> None:
        """Removes the bar and shows the run's last sentence."""
        self.close()
        self._print(Text(sentence, style="bold"))

    def close(self) -> None:
        """Removes the bar. Later output is plain."""
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._progress.stop()

    def _show(self, description: str, done: int | None = None, total: int | None = None) -> None:
        """Shows the bar with this text; without `done` its position does not change."""
        if not self._live:
            return
        if self._task is None:
            self._task = self._progress.add_task(description, total=None, count="")
            self._progress.start()
        self._progress.update(self._task, description=description)
        if done is not None:
            self._progress.update(self._task, completed=done, total=total, count=_count(done, total or 0))

    def _print(self, text: Text) -> None:
        self._rich.print(text)

    def _clock(self) -> str:
        """Minutes and seconds since this console was made."""
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        return f"{minutes:02d}:{seconds:02d}"


_SECONDS = (
    ("generate", "generate"),
    ("wait", "wait"),
    ("pack", "pack"),
    ("forward", "forward"),
    ("forward_backward", "train"),
    ("optim_step", "optimize"),
    ("critic", "critic"),
    ("push", "push"),
    ("pull", "pull"),
    ("evaluate", "evaluate"),
)
"""(phase of a step, its word on the line), in the order in which phases happen."""


def step_line(metrics: Mapping[str, float], total_steps: int, width: int | None = None) -> Text:
    """The line of one step, with the metrics that a user watches: of those, the most telling that fit into `width`."""
    parts = _step_parts(metrics)
    line = Text(f"{int(metrics['step']):>{len(str(total_steps))}}/{total_steps}")
    room = math.inf if width is None else width - len(line)
    fitting: set[str] = set()
    for name in _MOST_TELLING:
        if name in parts and len(parts[name]) <= room:
            fitting.add(name)
            room -= len(parts[name])
    for name, part in parts.items():
        if name in fitting:
            line.append_text(part)
    seconds = [(word, metrics[f"seconds_{phase}"]) for phase, word in _SECONDS if f"seconds_{phase}" in metrics]
    texts = {word: f"{word} {_number(value, '.1f')}" for word, value in seconds}
    room -= len(" (")
    shown: set[str] = set()
    for word, _ in sorted(seconds, key=lambda phase: -phase[1]):
        if len(texts[word]) + 1 <= room:  # and a blank or the bracket at the end
            shown.add(word)
            room -= len(texts[word]) + 1
    if shown:
        line.append(f" ({' '.join(text for word, text in texts.items() if word in shown)})", style="dim")
    return line


_MOST_TELLING = ("reward", "loss", "seconds", "grad", "mismatch", "staleness", "rates", "lr")
"""Parts of a step's line. If the line is too long, the last of them are left out first."""


def _step_parts(metrics: Mapping[str, float]) -> dict[str, Text]:
    """The parts of a step's line that there are, in the order in which they are shown."""
    parts: dict[str, Text] = {}
    if "reward_mean" in metrics:
        parts["reward"] = Text("  reward ")
        parts["reward"].append(_number(metrics["reward_mean"], ".3f"), style="bold green")
        parts["reward"].append(f"±{_number(metrics.get('reward_std', math.nan), '.2f')}")
    for label, name, form in (
        ("loss", "loss", "+.4f"),
        ("grad", "grad_norm", ".3g"),
        ("lr", "learning_rate", ".2g"),
        ("mismatch", "logprob_mismatch_mean", ".4f"),
        ("staleness", "staleness_mean", ".2f"),
    ):
        if name in metrics:
            value = metrics[name]
            parts[label] = Text(f"  {label} ")
            parts[label].append(_number(value, form), style="" if math.isfinite(value) else "bold red")
    names = (f"{side}_tokens_per_s" for side in ("generation", "training"))
    if rates := [_number(metrics[name], ".0f") for name in names if name in metrics]:
        parts["rates"] = Text(f"  tok/s {'/'.join(rates)}")
    if "seconds_step" in metrics:
        parts["seconds"] = Text(f"  {_number(metrics['seconds_step'], '.1f')} s", style="cyan")
    return parts


def _count(done: int, total: int) -> str:
    """How much is done, of how much, and the percentage, rounded down."""
    return f"{done} of {total} ({100 * done // max(total, 1)} %)"


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else str(value)


def _indent(label: str, text: str) -> str:
    """`text` after a label, with later lines aligned to the first. A very long text is cut off."""
    text = text.strip()
    if len(text) > _MAX_SAMPLE_CHARACTERS:
        text = text[:_MAX_SAMPLE_CHARACTERS] + " ..."
    return "  " + label + text.replace("\n", "\n  " + " " * len(label))
