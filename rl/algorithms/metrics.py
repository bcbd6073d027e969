"""Metrics of a step: flat dictionaries of floats, one function per source."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from rl.advantages import has_signal
from rl.data.batching import merge_metrics
from rl.losses import RESERVED_METRICS
from rl.losses.shared import MAX_LOG_RATIO
from rl.system.timeline import CONTROLLER, span
from rl.types import Datum, ForwardBackwardOutput, Group, OptimStepOutput

Array = NDArray[np.float32]
_DATUMS_AT_ONCE = 32


class PhaseClock:
    """Measures the seconds spent in each phase of a step.

    with clock("generate"): ...
    """

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, on_begin: Callable[[str], None] = lambda _phase: None
    ) -> None:
        """Starts the step. `on_begin` is called with the name of each phase that begins."""
        self._now, self._on_begin = now, on_begin
        self._start = now()
        self._phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        """Adds the duration of the `with` block to a phase."""
        self._on_begin(phase)
        start = self._now()
        try:
            with span(CONTROLLER, phase):
                yield
        finally:
            self._phases[phase] = self._phases.get(phase, 0.0) + self._now() - start

    def seconds(self, phase: str) -> float:
        """Seconds spent in a phase so far."""
        return self._phases.get(phase, 0.0)

    def metrics(self) -> dict[str, float]:
        """`seconds_<phase>` for every phase, and `seconds_step`, the time since the clock was created."""
        phases = {f"seconds_{phase}": seconds for phase, seconds in self._phases.items()}
        return {**phases, "seconds_step": self._now() - self._start}


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Reward, length and signal of a step's rollouts, and the means of the metrics that their environment reports.

    A metric that only some rollouts report is averaged over these. Without rollouts, only the counts are returned.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    counts = {
        "groups_with_signal": float(sum(has_signal(group.rewards) for group in groups)),
        "env_failures": float(sum(len(group.failures) for group in groups)),
    }
    if not rollouts:
        return counts
    rewards = np.array([rollout.reward for rollout in rollouts])
    reported: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            reported.setdefault(name, []).append(value)
    return {
        **{name: float(np.mean(values)) for name, values in reported.items()},
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "completion_tokens_mean": num_completion_tokens(groups) / len(rollouts),
        "truncated_fraction": float(np.mean([rollout.truncated for rollout in rollouts])),
        "turns_mean": float(np.mean([len(rollout.turns) for rollout in rollouts])),
        "seconds_environment_max": max(rollout.environment_s for rollout in rollouts),
        **counts,
    }


def num_completion_tokens(groups: Sequence[Group]) -> int:
    """Number of tokens sampled in these groups."""
    turns = (turn for group in groups for rollout in group.rollouts for turn in rollout.turns)
    return sum(len(turn.completion.tokens) for turn in turns)


def policy_staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Mean and maximum, over all sampled tokens, of the staleness: `version` minus the version that sampled the token.

    `version` is that of the policy that trains on the tokens. Empty if there are no tokens.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    versions = [v for rollout in rollouts for turn in rollout.turns for v in turn.completion.versions]
    if not versions:
        return {}
    staleness = version - np.array(versions)
    return {"staleness_mean": float(staleness.mean()), "staleness_max": float(staleness.max())}


def logprob_mismatch(batch: Sequence[Datum], output: ForwardBackwardOutput) -> dict[str, float]:
    """The train-inference mismatch on sampled tokens: delta = the trainer's log-prob - the generator's.

    It is meaningful only if the trainer computed `output` with the weights that sampled the batch. The expectation of
    exp(delta) is 1 if both compute the same distribution. Empty for a batch without scored tokens or without the
    generator's log-probs.
    """
    if not all("logprobs" in datum.loss_inputs for datum in batch):
        return {}
    num_counted, distances, ratios, largest = 0, 0.0, 0.0, 0.0
    # What fits into the processor's cache, of millions of tokens, in memory that stays.
    rooms = np.empty((2, _DATUMS_AT_ONCE * max((len(datum.tokens) for datum in batch), default=0)), np.float32)
    for first in range(0, len(batch), _DATUMS_AT_ONCE):
        datums = batch[first : first + _DATUMS_AT_ONCE]
        delta, other = rooms[:, : sum(len(datum.tokens) for datum in datums)]
        np.concatenate(output.logprobs[first : first + _DATUMS_AT_ONCE], out=delta)
        delta -= np.concatenate([datum.loss_inputs["logprobs"] for datum in datums], out=other)
        counted = np.concatenate([datum.weights for datum in datums], out=other) != 0
        np.copyto(delta, 0, where=~counted)
        distance = np.abs(delta, out=other)
        here = int(np.count_nonzero(counted))
        num_counted += here
        distances += float(distance.sum())
        largest = max(largest, float(distance.max(initial=0.0)))
        exponents = delta if largest < 1 else np.minimum(delta.astype(np.float64), MAX_LOG_RATIO)
        ratios += float(np.exp(exponents).sum()) - (len(delta) - here)
    if num_counted == 0:
        return {}
    return {
        "logprob_mismatch_mean": distances / num_counted,
        "logprob_mismatch_max": largest,
        "ratio_mean": ratios / num_counted,
    }


def merge_outputs(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """Merges outputs of several calls, at least one, into that of one call with all datums.

    Entropies and values are None unless every output has them.
    """
    return ForwardBackwardOutput(
        logprobs=tuple(array for output in outputs for array in output.logprobs),
        entropy=_joined([output.entropy for output in outputs]),
        values=_joined([output.values for output in outputs]),
        metrics=merge_metrics([output.metrics for output in outputs]),
    )


def _joined(parts: Sequence[tuple[Array, ...] | None]) -> tuple[Array, ...] | None:
    """The arrays of all parts in order, or None if a part is missing."""
    arrays: list[Array] = []
    for part in parts:
        if part is None:
            return None
        arrays += part
    return tuple(arrays)


def update_metrics(updates: Sequence[OptimStepOutput], model: str = "") -> dict[str, float]:
    """What the updates of one model in a step did; the names begin with `model`, unless it is the policy.

    `skipped` counts them. `grad_norm` is the last update's, or that of the first which was skipped.
    """
    skipped = [update for update in updates if update.skipped]
    prefix, shown = f"{model}_" if model else "", (*skipped, updates[-1])[0]
    return {f"{prefix}grad_norm": shown.grad_norm, f"{prefix}skipped": float(len(skipped))}


def num_skipped(row: Mapping[str, float]) -> float:
    """How many updates of all models were skipped in a step, of which `row` has the metrics."""
    return sum(value for name, value in row.items() if name == "skipped" or name.endswith("_skipped"))


def loss_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that a loss returned, `seconds_engine_max` and `mfu`, as a run reports them.

    `metrics` come from `forward_backward`. Sums over the scored tokens are divided by the number of these. A metric
    whose name ends in `_max`, `_min` or `_sum` stays as it is.
    """
    num_loss_tokens = metrics["num_loss_tokens"] or 1
    reported = {
        name: value if name.endswith(("_max", "_min", "_sum")) else value / num_loss_tokens
        for name, value in metrics.items()
        if name == "seconds_engine_max" or name not in RESERVED_METRICS
    }
    flops, peak_flops = metrics.get("model_flops", 0.0), metrics.get("peak_flops", 0.0)
    return {**reported, "mfu": flops / peak_flops} if flops and peak_flops else reported  # 0 stands for not known
