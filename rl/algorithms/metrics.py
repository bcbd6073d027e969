"""What a step reports about itself: flat dictionaries of floats, one function per source."""

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from rl.advantages.group_relative import has_signal
from rl.data.batching import merge_metrics
from rl.types import Datum, ForwardBackwardOutput, Group


class PhaseClock:
    """Seconds spent in each phase of a step.

    with clock("generate"): ...
    """

    def __init__(self) -> None:
        """Starts the step."""
        self._start = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        """Adds the time of the block to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._phases[phase] = self._phases.get(phase, 0.0) + time.perf_counter() - start

    def seconds(self, phase: str) -> float:
        """Seconds spent in a phase so far."""
        return self._phases.get(phase, 0.0)

    def metrics(self) -> dict[str, float]:
        """`seconds_<phase>` of every phase, `seconds_step` since the clock was made."""
        phases = {f"seconds_{phase}": seconds for phase, seconds in self._phases.items()}
        return {**phases, "seconds_step": time.perf_counter() - self._start}


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Reward, length and signal of one step's rollouts, and what their environment reports, averaged by name.

    A name that only some rollouts report is averaged over those. Without rollouts only the counts.
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
        "completion_tokens_mean": float(np.mean([rollout.num_sampled_tokens for rollout in rollouts])),
        "truncated_fraction": float(np.mean([rollout.truncated for rollout in rollouts])),
        "turns_mean": float(np.mean([len(rollout.turns) for rollout in rollouts])),
        "seconds_environment_max": max(rollout.environment_s for rollout in rollouts),
        **counts,
    }


def num_completion_tokens(groups: Sequence[Group]) -> int:
    """Tokens sampled in these groups."""
    return sum(rollout.num_sampled_tokens for group in groups for rollout in group.rollouts)


def policy_staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Optimizer steps between the policy that sampled a token and `version`, the one that trains on it.

    Over all sampled tokens; empty without any.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    versions = [v for rollout in rollouts for turn in rollout.turns for v in turn.completion.versions]
    if not versions:
        return {}
    staleness = version - np.array(versions)
    return {"staleness_mean": float(staleness.mean()), "staleness_max": float(staleness.max())}


def logprob_mismatch(batch: Sequence[Datum], output: ForwardBackwardOutput) -> dict[str, float]:
    """How far trainer and generator disagree on the tokens just sampled, delta = trainer's log-prob - generator's.

    Only meaningful when the trainer held the weights that sampled the batch. The mean of exp(delta) is 1 in expectation
    when both compute the same distribution. Empty for a batch that scores nothing, or that nobody sampled.
    """
    if not all("logprobs" in datum.loss_inputs for datum in batch):
        return {}
    pairs = zip(batch, output.logprobs, strict=True)
    gaps = [(p - d.loss_inputs["logprobs"])[d.weights != 0] for d, p in pairs]
    delta = np.concatenate([*gaps, np.zeros(0)]).astype(np.float64)
    if len(delta) == 0:
        return {}
    return {
        "logprob_mismatch_mean": float(np.abs(delta).mean()),
        "logprob_mismatch_max": float(np.abs(delta).max()),
        "ratio_mean": float(np.exp(delta).mean()),
    }


def merge_outputs(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """The outputs of several `forward_backward` calls as of one call with all their datums; at least one."""
    return replace(
        outputs[0],
        logprobs=tuple(array for output in outputs for array in output.logprobs),
        metrics=merge_metrics([output.metrics for output in outputs]),
    )


def per_token(metrics: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """These sums of a `forward_backward`, divided by its number of scored tokens."""
    return {name: metrics[name] / metrics["num_loss_tokens"] for name in names if name in metrics}
