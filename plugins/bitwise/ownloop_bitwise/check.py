"""Stops a run whose trainer and generator do not agree on a sampled token, bit by bit.

Compared are the tokens that the trainer's own version sampled. Older ones, of asynchronous loops and of later
minibatches, have other log-probs by right.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from controller.processes.errors import TrainingStoppedError
from controller.runs.folder import METRICS, RunFolder, read_metrics
from controller.runs.metric_rows import by_step, last_row_with, metric_differences
from controller.runs.observers import Observer
from rl.types import Datum, ForwardBackwardOutput, Group, Rollout

_CAUSE = (
    "Then the two compute with different weights or of different inputs: a push or a pull went wrong, or a file or a "
    "memory is damaged. `ownloop parity` compares the two sides alone"
)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first sampled token on whose log-prob the two sides differ."""

    problem_id: str
    """Of its group."""
    rollout: int
    """Its number within the group."""
    token: int
    """Its number among the sampled tokens of the rollout."""
    trainers: float
    generators: float
    num_different: int
    """Of all tokens that were compared."""
    num_compared: int


def first_difference(
    groups: Sequence[Group], batch: Sequence[Datum], output: ForwardBackwardOutput, version: int
) -> Difference | None:
    """Compares the tokens that `version` sampled, of the data that were made of these groups.

    `output` has the trainer's log-probs, computed with that version. None if all are equal.
    """
    known: dict[bytes, list[tuple[Group, int]]] = {}
    for group in groups:
        for number, rollout in enumerate(group.rollouts):
            known.setdefault(_tokens_of(rollout).tobytes(), []).append((group, number))
    first: tuple[str, int, int, float, float] | None = None
    num_different = num_compared = 0
    for datum, scored in zip(batch, output.logprobs, strict=True):
        sequence = np.concatenate([datum.tokens[:1], datum.loss_inputs["target_tokens"]])
        for group, number in known.get(sequence.tobytes(), ()):
            where, versions, theirs = _sampled(group.rollouts[number])
            if not np.array_equal(datum.loss_inputs["logprobs"][where], theirs):
                continue  # another rollout of the same tokens
            compared = (versions == version) & (datum.weights[where] != 0)
            differs = compared & (scored[where] != theirs)
            num_compared += int(compared.sum())
            num_different += int(differs.sum())
            if first is None and differs.any():
                token = int(differs.argmax())
                first = (group.problem_id, number, token, float(scored[where][token]), float(theirs[token]))
            break
    return None if first is None else Difference(*first, num_different, num_compared)


def _tokens_of(rollout: Rollout) -> NDArray[np.int64]:
    return np.array([t for turn in rollout.turns for t in (*turn.prompt_tokens, *turn.completion.tokens)], np.int64)


def _sampled(rollout: Rollout) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Of the sampled tokens: their positions in a datum, the versions that sampled them, and their log-probs."""

    def places() -> Iterator[int]:
        end = -1  # a datum's targets begin with the second token
        for turn in rollout.turns:
            begin = end + len(turn.prompt_tokens)
            end = begin + len(turn.completion.tokens)
            yield from range(begin, end)

    completions = [turn.completion for turn in rollout.turns]
    versions = [version for each in completions for version in each.versions]
    logprobs = [logprob for each in completions for logprob in each.logprobs]
    return np.fromiter(places(), np.int64), np.array(versions, np.int64), np.array(logprobs, np.float32)


class BitwiseCheck(Observer):
    """Checks every step of a run with `numerics` "bitwise", and ends it at the first difference."""

    def __init__(self, folder: RunFolder) -> None:
        """Is idle in other runs."""
        super().__init__(folder)
        self._is_active = folder.config.get("numerics") == "bitwise"
        self._before = self._now = 0
        self._largest = 0.0
        self._groups: Sequence[Group] = ()
        repeated = folder.config.get("schedule")
        self._repeated = by_step(read_metrics(Path(repeated) / METRICS)) if repeated else {}

    def resume(self, last_step: int) -> None:
        """Reads which version the run had reached."""
        del last_step
        row = last_row_with(self.folder.metrics_file, "policy_version") if self._is_active else None
        self._before = self._now = 0 if row is None else int(row["policy_version"])

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Notes the trainer's version before and after the step.

        Raises `TrainingStoppedError` for a metric that is another than in the run that is repeated.
        """
        step = int(metrics["step"])
        theirs = {name: value for name, value in self._repeated.get(step, {}).items() if name in metrics}
        if self._repeated and (found := metric_differences({step: metrics}, {step: theirs})):
            raise TrainingStoppedError(
                f"step {step}: {found[0].name} is {found[0].values[0]!r}, and was {found[0].values[1]!r} in the run "
                "that `schedule` repeats"
            )
        if "policy_version" in metrics:
            self._before, self._now = self._now, int(metrics["policy_version"])
            self._largest = metrics.get("logprob_mismatch_max", 0.0)

    def log_rollouts(self, step: int, groups: Sequence[Group], *, split: str = "train") -> None:
        """Keeps the step's rollouts until it is over."""
        del step
        self._groups = groups if split == "train" else self._groups

    def after_step(self, step: int, batch: Sequence[Datum] = (), output: ForwardBackwardOutput | None = None) -> None:
        """Raises `TrainingStoppedError` for a difference, naming step, problem, rollout, token and both log-probs."""
        groups, self._groups = self._groups, ()
        if not self._is_active or output is None or not all("logprobs" in datum.loss_inputs for datum in batch):
            return
        if self._now - self._before > 1:  # later minibatches were scored by newer weights; the metric is of the first
            versions = {v for g in groups for r in g.rollouts for turn in r.turns for v in turn.completion.versions}
            if versions == {self._before} and not self._largest == 0:
                raise TrainingStoppedError(
                    f"step {step}: numerics is 'bitwise', and log-probs of trainer and generator differ by "
                    f"{self._largest:.3g}. {_CAUSE}."
                )
            return
        found = first_difference(groups, batch, output, self._before)
        if found is not None:
            raise TrainingStoppedError(
                f"step {step}: numerics is 'bitwise', and the log-prob of token {found.token} of rollout "
                f"{found.rollout} of problem {found.problem_id!r} is {found.trainers!r} in the trainer and "
                f"{found.generators!r} in the generator; {found.num_different} of {found.num_compared} tokens differ. "
                f"{_CAUSE}."
            )
