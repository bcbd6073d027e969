"""What a report shows, as one object in JSON types. Its size is bounded, however long the run."""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from controller.runs.folder import CONFIG_FILE, HOST_FILE, METRICS, ROLLOUTS
from controller.runs.metric_rows import thinned_metrics
from controller.runs.report.samples import Decode, evaluation_samples, mismatch_samples
from controller.runs.report.warnings_in_words import warnings_of
from controller.runs.state import state_of
from rl.system.files import read_json
from rl.system.timeline import CONTROLLER, TIMELINE, read_timeline

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
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
_NOT_A_PHASE = ("seconds_step", "seconds_environment_max", "seconds_engine_max")
_SUMMARY = ("model", "seed", "learning_rate", "num_steps", "prompts_per_step", "group_size", "loss", "advantage")


def report_contents(run: Path, decode: Decode | None = None, command: str = "") -> dict[str, Any]:
    """Everything about the run in this folder; it may still be going on. `decode` cuts answers into their tokens."""
    config: dict[str, Any] = read_json(run / CONFIG_FILE)
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
        "phases": _phases(steps),
        "memory": [curve for name in memory if (curve := _memory(rows, name))],
        "timeline": _timeline(run / TIMELINE, steps),
        "evaluations": evaluation_samples(run / ROLLOUTS, decode),
        "mismatch": mismatch_samples(run, decode),
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
        found.append(("duration", duration(times[-1] - times[0] + rows[0].get("seconds_step", 0.0))))
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
    if not spans or not ends:
        return {"processes": [], "spans": [], "seconds": 0.0}
    last = steps[-_STEPS_IN_TIMELINE:]
    begin = ends[-len(last)] - last[0]["seconds_step"]
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


def _thinned(points: Sequence[Any]) -> list[Any]:
    """At most `_MAX_POINTS` of them, evenly, with the last."""
    if len(points) <= _MAX_POINTS:
        return [*points]
    stride = math.ceil(len(points) / _MAX_POINTS)
    return [*points[:-1:stride], points[-1]]
