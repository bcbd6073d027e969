"""Writes a run's `report.html`: one file that needs nothing else, so that it opens from a disk and can be sent.

`report_contents` collects what the page shows as one object in JSON types, whose size is bounded however long the run.
`write_report` puts that object into `page.html`. While the run continues, `ReportWriter` does so again and again:

    loop's thread                        recording thread (`RunFolder.in_background`)
    StepLog.step -> after_step --due-->  timeline.json, token_samples.json, report.html
                    next page is due <-- 30 s later, or 100 times the CPU time that this page took
"""

import contextlib
import json
import math
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from controller.runs.folder import CONFIG_FILE, HOST_FILE, METRICS, ROLLOUTS, RunFolder, state_of
from controller.runs.observers import Observer
from ownloop_report.plot import hand_back_garbage, thinned_metrics
from ownloop_report.samples import (
    Decode,
    TokenSamples,
    decoder_of,
    evaluation_samples,
    mismatch_samples,
    session_trees,
)
from ownloop_report.timeline_spans import read_timeline
from ownloop_report.warnings_in_words import warnings_of
from rl.system.disk import RecordingError, read_json, to_json, write_json, write_whole
from rl.system.hardware import describe_software
from rl.system.timeline import CONTROLLER, TIMELINE, Timeline
from rl.types import Datum, ForwardBackwardOutput

REPORT = "report.html"
_PLACE = "/*DATA*/"
_MAX_POINTS = 600
_MAX_SPANS = 1500
_STEPS_IN_TIMELINE = 3
_CURVES = (
    ("reward_mean", "eval_reward", "reward"),
    ("loss", "eval_loss", "loss"),
    ("accuracy", "eval_accuracy", "accuracy"),
    ("kl_to_teacher", "eval_kl_to_teacher", "KL to the teacher"),
    ("kl_reference", "", "KL to the reference"),
    ("kl_generator", "", "KL, generator to trainer"),
    ("logprob_mismatch_mean", "", "mismatch of log-probs"),
    ("entropy", "", "entropy"),
    ("completion_tokens_mean", "", "tokens of a rollout"),
    ("staleness_mean", "", "staleness"),
    ("grad_norm", "", "norm of the gradient"),
    ("learning_rate", "", "learning rate"),
)
_NO_CURVE = ("step", "time", "schema_version")
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
_NOT_A_PHASE = ("seconds_step", "seconds_environment_max", "seconds_engine_max")
_SUMMARY = ("model", "seed", "learning_rate", "num_steps", "prompts_per_step", "group_size", "loss", "advantage")
_SECONDS_BETWEEN = 30.0
_TIMELINE_SECONDS_BETWEEN = 10.0
_LARGEST_SHARE = 0.01
_Step = tuple[int, Sequence[Datum], ForwardBackwardOutput]


def write_report(
    run: Path, decode: Decode | None = None, command: str = "", file: Path | None = None, *, state: str | None = None
) -> Path:
    """Writes the report of the run in this folder, which may still be running, and returns its path.

    `decode` turns the model's tokens into text; without it, answers are not cut into tokens. `state` replaces what the
    folder says. Raises `RecordingError`.
    """
    file, contents = file or run / REPORT, report_contents(run, decode, command)
    # whole: a browser may read the page while it is written
    write_whole(file, page(contents if state is None else {**contents, "state": state}).encode())
    return file


def page(contents: dict[str, Any]) -> str:
    """The page that shows these contents."""
    template = files("ownloop_report").joinpath("page.html").read_text(encoding="utf-8")
    # Answers may hold "</script>" and "<!--", which would end the element or change how it is read.
    text = json.dumps(to_json(contents), allow_nan=False).replace("<", "\\u003c")
    return template.replace(_PLACE, text, 1)


def report_contents(run: Path, decode: Decode | None = None, command: str = "") -> dict[str, Any]:
    """Everything about the run in this folder; it may still be running. `decode` cuts answers into their tokens."""
    config: dict[str, object] = read_json(run / CONFIG_FILE)
    rows = thinned_metrics(run / METRICS)
    steps = [row for row in rows if "seconds_step" in row]
    memory = [*dict.fromkeys(name for row in steps for name in row if name.startswith("memory_peak_bytes_"))]
    return {
        "name": run.name,
        "state": state_of(run),
        "written": time.time(),
        "command": command,
        "headline": _headline(run, rows),
        "summary": [[name, config[name]] for name in _SUMMARY if name in config],
        "config": config,
        "done": int(max((row["step"] for row in rows), default=0)),
        "warnings": [[warned.rule, warned.text] for warned in warnings_of(rows, run / ROLLOUTS)],
        "curves": [curve for names in _CURVES if (curve := _curve(rows, *names))],
        "other_curves": _other_curves(rows),
        "phases": _phases(steps),
        "memory": [curve for name in memory if (curve := _memory(rows, name))],
        "timeline": _timeline(run / TIMELINE, steps),
        "evaluations": evaluation_samples(run / ROLLOUTS, decode),
        "mismatch": mismatch_samples(run, decode),
        "sessions": session_trees(run),
        "profiles": sorted(f"logs/{file.name}" for file in (run / "logs").glob("profile-*.json.gz")),
    }


def _headline(run: Path, rows: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """[label, text] of the first curve's change, how long it took, and where it ran. Leaves out what is not known."""
    found: list[tuple[str, str]] = []
    curve = next((curve for names in _CURVES if (curve := _curve(rows, *names))), None)
    if curve is not None:
        kind, points = ("held-out", curve["held_out"]) if curve["held_out"] else ("training", curve["points"])
        (first, before, *_), (last, after, *_) = points[0], points[-1]
        change = f"{before:.3f} to {after:.3f}, after {first:.0f} and {last:.0f} steps"
        found.append((f"{kind} {curve['label']}", change if len(points) > 1 else f"{after:.3f} after {last:.0f} steps"))
    times = [row["time"] for row in rows if "time" in row]
    if times:
        # a resumed run's clock may have been set back in between
        passed = sum(max(0.0, later - earlier) for earlier, later in pairwise(times))
        found.append(("duration", duration(passed + rows[0].get("seconds_step", 0.0))))
    host = read_json(run / HOST_FILE) if (run / HOST_FILE).is_file() else {}
    return [*found, *((name, str(host[name])) for name in ("hardware", "versions") if name in host)]


def duration(seconds: float) -> str:
    """A number of seconds in its two largest units."""
    units = {"d": 86400, "h": 3600, "min": 60, "s": 1}
    parts, left = list[str](), max(0, round(seconds))
    for name, size in units.items():
        count, left = divmod(left, size)
        if count or parts or name == "s":
            parts.append(f"{count} {name}")
    return " ".join(parts[:2])


def _memory(rows: Sequence[Mapping[str, float]], name: str) -> dict[str, Any] | None:
    """A curve of bytes in the largest unit of which its highest point is at least one."""
    label = name.removeprefix("memory_peak_bytes_").removesuffix("_max").replace("_", " ")
    curve = _curve(rows, name, "", label)
    if curve is None:
        return None
    highest = max(value for _, value in curve["points"])
    unit, size = next((each for each in _UNITS if highest >= each[1]), _UNITS[-1])
    return {**curve, "unit": unit, "points": [[step, value / size] for step, value in curve["points"]]}


def _curve(rows: Sequence[Mapping[str, float]], training: str, held_out: str, label: str) -> dict[str, Any] | None:
    """Points [step, value] in training and [step, value, low, high] on held-out data; None if there are none."""
    points = [[row["step"], row[training]] for row in rows if math.isfinite(row.get(training, math.nan))]
    names = (held_out, f"{held_out}_low", f"{held_out}_high")
    evaluated = [
        [row["step"], *(row[name] for name in names)]
        for row in rows
        if held_out and all(math.isfinite(row.get(name, math.nan)) for name in names)
    ]
    if not points and not evaluated:
        return None
    return {"name": training, "label": label, "points": _thinned(points), "held_out": _thinned(evaluated)}


def _other_curves(rows: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """A curve of every metric that has no other one, with its values on held-out data if there are some."""
    names = dict.fromkeys(name for row in rows for name in row)
    held_out = [name for name in names if f"{name}_low" in names]
    hidden = {*_NO_CURVE, *(f"{name}{end}" for name in held_out for end in ("", "_low", "_high"))}
    pairs = [(name, f"eval_{name}") for name in names if name not in hidden]
    trained = {name for _, name in pairs}
    pairs += [("", name) for name in held_out if name not in trained]
    shown = {name for training, evaluated, _ in _CURVES for name in (training, evaluated) if name}
    curves = (_curve(rows, *pair, pair[0] or pair[1]) for pair in pairs if not shown.intersection(pair))
    return [curve for curve in curves if curve is not None]


def _phases(steps: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Seconds of each phase in each step, in the order of the phases; `other` is the rest of the step."""
    shown = _thinned(steps)
    names = [*dict.fromkeys(n for row in shown for n in row if n.startswith("seconds_") and n not in _NOT_A_PHASE)]
    series = {name.removeprefix("seconds_"): [row.get(name, 0.0) for row in shown] for name in names}
    rest = [max(0.0, row["seconds_step"] - sum(row.get(name, 0.0) for name in names)) for row in shown]
    return {"steps": [row["step"] for row in shown], "series": {**series, "other": rest}}


def _timeline(file: Path, steps: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The spans of the last steps, in seconds since the first of them; the controller first."""
    spans = read_timeline(file)
    ends = [row["time"] for row in steps if "time" in row]
    last = steps[-_STEPS_IN_TIMELINE:]
    # the first shown step began so long before its end
    begin = ends[-len(last)] - last[0]["seconds_step"] if ends else 0.0
    if not spans or not ends or begin > ends[-1]:  # the clock was set back before the run was resumed
        return {"processes": [], "spans": [], "seconds": 0.0}
    shown = [each for each in spans if each[4] > begin and each[3] < ends[-1]][-_MAX_SPANS:]
    processes = sorted({process for process, *_ in shown}, key=lambda process: (process != CONTROLLER, process))
    return {
        "processes": processes,
        "spans": [
            [processes.index(process), name, lane, round(max(since, begin) - begin, 4), round(until - begin, 4)]
            for process, name, lane, since, until in shown
        ],
        "seconds": round(ends[-1] - begin, 4),
    }


def _thinned(points: Sequence[object]) -> list[Any]:
    """At most `_MAX_POINTS` of them, evenly, with the last."""
    if len(points) <= _MAX_POINTS:
        return [*points]
    stride = math.ceil(len(points) / _MAX_POINTS)
    return [*points[:-1:stride], points[-1]]


class ReportWriter(Observer):
    """Keeps a run's `report.html` and `timeline.json` up to date while it runs, at less than 1 % of its time."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        thread_time: Callable[[], float] = time.thread_time,
        write: Callable[..., object] = write_report,
    ) -> None:
        """From now on, phases and calls of the current context are in the timeline.

        `monotonic` and `thread_time` return seconds as the functions of `time` do; `write` writes the page.
        """
        super().__init__(folder)
        self._monotonic, self._thread_time, self._write = monotonic, thread_time, write
        host = {"hardware": describe_host(), "versions": describe_software()}
        folder.in_background(partial(write_json, folder.path / HOST_FILE, host))
        self._timeline = Timeline(folder.path / TIMELINE)
        self._timeline.activate()
        self._samples = TokenSamples(folder.path, 0)
        self._num_steps = 0
        self._last: _Step | None = None
        self._page_due_at = self._monotonic() + _SECONDS_BETWEEN
        self._timeline_due_at = self._monotonic() + _TIMELINE_SECONDS_BETWEEN

    def resume(self, last_step: int) -> None:
        """The run continues after `last_step`."""
        self._samples = TokenSamples(self.folder.path, last_step)

    def after_step(self, step: int, batch: Sequence[Datum] = (), output: ForwardBackwardOutput | None = None) -> None:
        """Writes the files in the background if they are due.

        To be called once the step's metrics and rollouts are handed over to the folder.
        """
        self._num_steps += 1
        self._last = self._last if output is None else (step, batch, output)
        now = self._monotonic()
        if now >= self._page_due_at:
            self._page_due_at = float("inf")  # until it is written
            self.folder.in_background(partial(self._write_page, self._taken()))
        elif now >= self._timeline_due_at:
            self._timeline_due_at = now + _TIMELINE_SECONDS_BETWEEN
            self.folder.in_background(self._timeline.write)

    def finish(self) -> None:
        """Writes the files of a run that is over, in the background."""
        self._write_last_page("finished")

    def close(self) -> None:
        """Writes the files of a run that was stopped early or has failed, if it has done a step."""
        if self._num_steps:
            with contextlib.suppress(RecordingError):  # which has ended the run
                self._write_last_page("stopped")

    def _write_last_page(self, state: str) -> None:
        self._num_steps = 0
        self.folder.in_background(partial(self._write_page, self._taken(), state))

    def _taken(self) -> _Step | None:
        """The last step with an update, if no page has its answers yet."""
        last, self._last = self._last, None
        return last

    def _write_page(self, last: _Step | None, state: str | None = None) -> None:
        """Writes both files. A mistake in the page is in the log, and does not end the run; a full disk does."""
        started = self._thread_time()
        try:
            self._timeline.write()
            if last is not None:
                self._samples.add(*last, self.folder.config)
            self._samples.write()
            self._write(self.folder.path, decoder_of(self.folder.path), self.folder.command, state=state)
        except RecordingError:  # a full disk is the run's problem, and not the page's
            raise
        except Exception:
            traceback.print_exc()
        hand_back_garbage()
        took = self._thread_time() - started
        self._page_due_at = self._monotonic() + max(_SECONDS_BETWEEN, took / _LARGEST_SHARE)


def describe_host(cpuinfo: Path = Path("/proc/cpuinfo"), gpus: Path = Path("/proc/driver/nvidia/gpus")) -> str:
    """GPUs, processor, cores and memory in one line. Loads no library; GPUs are found by NVIDIA's driver."""
    fields = [line.partition(":") for line in cpuinfo.read_text().splitlines()] if cpuinfo.is_file() else []
    processor = next((value.strip() for name, _, value in fields if name.strip() == "model name"), os.uname().machine)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    models: list[str] = []
    for file in sorted(gpus.glob("*/information")):
        models += [
            line.partition(":")[2].strip() for line in file.read_text().splitlines() if line.startswith("Model:")
        ]
    parts = [f"{count} x {model}" for model, count in Counter(models).items()]
    return ", ".join([*parts, processor, f"{os.cpu_count()} cores", f"{memory / 2**30:.1f} GiB of memory"])
