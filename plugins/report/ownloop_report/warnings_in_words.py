"""What a reader of a run should be warned of, each by a rule that `plugins/report/README.md` documents.

A rule looks at the metrics, as `controller.runs.folder.read_metrics` returns them, and some at the recorded answers.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, cast

import pyarrow.parquet as pq

from controller.runs.folder import CONFIG_FILE, read_json
from controller.runs.recording import TRAINING, recorded_steps, recording_of
from rl.algorithms.metrics import num_skipped

Rows = Sequence[Mapping[str, float]]

_RECENT = 10
_MOST_MISMATCH = 0.05  # as `ownloop parity`
_MOST_TRUNCATED = 0.3
_SAME_ANSWER = 0.9
_MIN_PROMPTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """A warning about a run."""

    rule: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """When a reader is warned."""

    name: str
    when: str
    """As `plugins/report/README.md` says it."""
    check: Callable[[Rows, Path], str | None]
    """The warning, from the metrics and the folder of recorded rollouts; None if there is nothing to say."""


def warnings_of(rows: Rows, rollouts: Path) -> list[Warned]:
    """All warnings about a run, the gravest first."""
    found = ((rule.name, rule.check(rows, rollouts)) for rule in RULES)
    return [Warned(rule=name, text=text) for name, text in found if text is not None]


def _not_finite(rows: Rows, rollouts: Path) -> str | None:
    del rollouts
    steps = [int(row["step"]) for row in rows if num_skipped(row) or not math.isfinite(row.get("loss", 0.0))]
    return (
        f"{len(steps)} steps had a gradient or loss that was not finite, the first is step {steps[0]}"
        if steps
        else None
    )


def _collapsed(rows: Rows, rollouts: Path) -> str | None:
    del rows
    steps = recorded_steps(rollouts, TRAINING)

    def answer_of(index: int) -> str | None:
        return _same_answer(recording_of(rollouts, int(steps[index]), TRAINING))

    if len(steps) < 2 or not (answer := answer_of(-1)):
        return None
    # Halves the steps between one whose answers differ and one whose answers are the same.
    low, high = -1, len(steps) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if answer_of(middle) else (middle, high)
    if low < 0:
        return f"all prompts have had nearly the same answer since step {steps[0]}, the first one recorded"
    return f"the policy collapsed to one answer after step {steps[low]}: {answer[:60]!r} for different prompts"


def _same_answer(file: Path) -> str | None:
    """The answer that nearly all prompts of a step had; None if they differ, or if there are too few prompts."""
    with pq.ParquetFile(file) as opened:
        table = opened.read(columns=["prompt", "turns.list.element.text"])
    rows = cast("list[dict[str, Any]]", table.to_pylist())
    if len({row["prompt"] for row in rows}) < _MIN_PROMPTS:
        return None
    answers = Counter(row["turns"][-1]["text"] for row in rows if row["turns"])
    answer, count = answers.most_common(1)[0] if answers else ("", 0)
    return answer if count >= _SAME_ANSWER * len(rows) else None


def _fell(rows: Rows, rollouts: Path) -> str | None:
    del rollouts
    evaluations = [row for row in rows if math.isfinite(row.get("eval_reward", math.nan))]
    if len(evaluations) < 2:
        return None
    best, last = max(evaluations, key=lambda row: row["eval_reward"]), evaluations[-1]
    if last["eval_reward_high"] >= best["eval_reward_low"]:
        return None
    return (
        f"the held-out reward fell from {best['eval_reward']:.3f} at step {best['step']:.0f} to "
        f"{last['eval_reward']:.3f} at step {last['step']:.0f}, and their intervals do not overlap"
    )


def _nothing_learned(rows: Rows, rollouts: Path) -> str | None:
    del rollouts
    evaluations = [row for row in rows if math.isfinite(row.get("eval_reward", math.nan))]
    if len(evaluations) < 2 or evaluations[-1]["step"] < 2 * _RECENT:
        return None
    first, last = evaluations[0], evaluations[-1]
    if last["eval_reward_low"] > first["eval_reward"] or last["eval_reward_high"] < first["eval_reward"]:
        return None
    return (
        f"the held-out reward at step {last['step']:.0f}, {last['eval_reward']:.3f}, cannot be told from the first "
        f"one, {first['eval_reward']:.3f}"
    )


def _mismatch(rows: Rows, rollouts: Path) -> str | None:
    del rollouts
    recent = _recent(rows, "logprob_mismatch_mean")
    if not recent or median(recent) <= _MOST_MISMATCH:
        return None
    return (
        f"in the last {len(recent)} steps trainer and generator differ by {median(recent):.3f} in the log-prob of a "
        "token; `ownloop parity` says why"
    )


def _no_signal(rows: Rows, rollouts: Path) -> str | None:
    del rollouts
    steps = [row for row in rows if "seconds_step" in row][-2 * _RECENT :]
    without = [row for row in steps if "skipped" not in row]
    if len(without) < _RECENT:
        return None
    return f"{len(without)} of the last {len(steps)} steps had nothing to learn from"


def _truncated(rows: Rows, rollouts: Path) -> str | None:
    del rollouts
    recent = _recent(rows, "truncated_fraction")
    if not recent or fmean(recent) <= _MOST_TRUNCATED:
        return None
    return (
        f"a token limit ended {fmean(recent):.0%} of the rollouts of the last {len(recent)} steps; max_tokens may be "
        "too low"
    )


def _entropy(rows: Rows, rollouts: Path) -> str | None:
    del rollouts
    values = [(row["step"], row["entropy"]) for row in rows if math.isfinite(row.get("entropy", math.nan))]
    if len(values) < 2 or values[-1][1] >= 0.1 * values[0][1]:
        return None
    step = next(step for step, value in values if value < 0.1 * values[0][1])
    return f"the entropy fell from {values[0][1]:.3f} to {values[-1][1]:.3f}; below a tenth first at step {step:.0f}"


def _env_failures(rows: Rows, rollouts: Path) -> str | None:
    del rollouts
    failed = [(int(row["step"]), row["env_failures"]) for row in rows if row.get("env_failures", 0) > 0]
    total = sum(count for _, count in failed)
    return (
        f"the environment lost {total:.0f} rollouts in {len(failed)} steps, first in step {failed[0][0]}"
        if failed
        else None
    )


def _unboxed(rows: Rows, rollouts: Path) -> str | None:
    del rows
    file = rollouts.with_name(CONFIG_FILE)
    chosen = _sandboxes(read_json(file)) if file.is_file() else set[str]()
    weak = sorted(chosen & {"none", "local"})
    return f"sandbox {weak[0]!r}: what the model wrote could do all that this user may" if weak else None


def _sandboxes(value: object) -> set[str]:
    """The values of all fields `sandbox` of a configuration in JSON types."""
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        own = {str(fields["sandbox"])} if "sandbox" in fields else set[str]()
        return own.union(*map(_sandboxes, fields.values()))
    return set[str]().union(*map(_sandboxes, cast("list[Any]", value))) if isinstance(value, list) else set()


def _recent(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows if math.isfinite(row.get(name, math.nan))][-_RECENT:]


RULES = (
    Rule(
        name="not-finite",
        when="a step's loss was not finite, or its gradient was not and it was skipped",
        check=_not_finite,
    ),
    Rule(
        name="collapse", when="90 % of a step's answers are the same text, for four prompts or more", check=_collapsed
    ),
    Rule(name="reward-fell", when="the last held-out reward's interval lies below that of the best one", check=_fell),
    Rule(
        name="nothing-learned",
        when="after 20 steps or more, the last held-out reward's interval holds the first held-out reward",
        check=_nothing_learned,
    ),
    Rule(
        name="mismatch",
        when="the median of `logprob_mismatch_mean` over the last 10 steps is above 0.05",
        check=_mismatch,
    ),
    Rule(name="no-signal", when="10 or more of the last 20 steps made no update", check=_no_signal),
    Rule(name="entropy", when="`entropy` is below a tenth of its first value", check=_entropy),
    Rule(
        name="truncated", when="the mean of `truncated_fraction` over the last 10 steps is above 0.3", check=_truncated
    ),
    Rule(name="env-failures", when="`env_failures` is above 0 in a step", check=_env_failures),
    Rule(name="unboxed", when='a `sandbox` of the configuration is "none" or "local"', check=_unboxed),
)
"""The gravest first."""
