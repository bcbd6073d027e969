"""Learning from pairs of answers of which one is better, by a trainer whose losses are sums over tokens.

A pair's loss is a function of its gap, (log-prob of chosen - of rejected) under the policy minus the same under the
reference, and couples two sequences that may well be computed in different micro-batches or on different ranks. Its
gradient does not: it is the loss's slope at the gap times the gradient of two sums of log-probs. So a step takes the
log-probs by `forward`, computes the slopes here, and has `cross_entropy` weigh the chosen tokens with minus the slope
and the rejected ones with the slope: the exact gradient, however the batch is cut.

Legend: B pairs; a batch of pairs is 2B datums, chosen and rejected in turn.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rl.data.sources import Preference
from rl.data.supervised import text_to_datum
from rl.protocols import Trainer
from rl.rollouts.evaluation import Measurement
from rl.rollouts.rendering import Renderer
from rl.runs.folder import write_json
from rl.types import Datum

Array = NDArray[np.float64]
PairLoss = Callable[[Array, float], tuple[Array, Array]]
"""(gaps [B], beta) -> losses [B] and their slopes, d loss / d gap [B]."""


def dpo(gaps: Array, beta: float) -> tuple[Array, Array]:
    """-log sigmoid(beta gap): direct preference optimisation, eq. 7 of https://arxiv.org/abs/2305.18290."""
    return np.logaddexp(0, -beta * gaps), -beta * np.exp(-np.logaddexp(0, beta * gaps))


def ipo(gaps: Array, beta: float) -> tuple[Array, Array]:
    """(gap - 1 / (2 beta))^2: does not push a pair apart for ever. Eq. 17 of https://arxiv.org/abs/2310.12036."""
    distance = gaps - 1 / (2 * beta)
    return distance**2, 2 * distance


PAIR_LOSSES: Mapping[str, PairLoss] = {"dpo": dpo, "ipo": ipo}
"""By the name that a recipe uses."""


def preferences_to_data(renderer: Renderer, preferences: Sequence[Preference], *, max_tokens: int) -> list[Datum]:
    """[2B] Two datums per pair, chosen and rejected, that score the answer and its end.

    Pairs of which one has more than `max_tokens` tokens are left out.
    """
    batch: list[Datum] = []
    for preference in preferences:
        prompt = renderer.encode(preference.prompt)
        answers = [renderer.encode_completion(answer) for answer in (preference.chosen, preference.rejected)]
        if len(prompt) + max(map(len, answers)) <= max_tokens:
            batch += [text_to_datum(prompt, answer, "completion") for answer in answers]
    return batch


async def sequence_logprobs(trainer: Trainer, batch: Sequence[Datum]) -> Array:
    """[D] log-prob of each datum's scored tokens together; of no datums, none."""
    if not batch:
        return np.zeros(0)
    output = await trainer.forward(batch)
    return np.array([logprobs.sum(dtype=np.float64) for logprobs in output.logprobs])


async def reference_logprobs(trainer: Trainer, batches: Iterable[Sequence[Datum]], file: Path) -> list[Array]:
    """`sequence_logprobs` of every batch, kept in a file; those that are in it already are read from there.

    Taken from the policy before its first update, they are those of a frozen reference, for no second model.
    """
    rows: list[list[float]] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    new = [await sequence_logprobs(trainer, batch) for batch in itertools.islice(batches, len(rows), None)]
    if new:
        rows += [row.tolist() for row in new]
        write_json(file, rows)
    return [np.array(row) for row in rows]


def pair_gaps(logprobs: Array, reference: Array) -> Array:
    """[2B] log-probs of policy and reference -> [B] gaps."""
    ratios = logprobs - reference
    return ratios[::2] - ratios[1::2]


def weigh_pairs(batch: Sequence[Datum], slopes: Array) -> list[Datum]:
    """The batch [2B] with weights by which `cross_entropy` has the gradient of the pairs' losses; `slopes` are [B]."""
    factors = np.stack([-slopes, slopes], axis=1).ravel()
    return [
        replace(datum, loss_inputs={**datum.loss_inputs, "weights": datum.weights * np.float32(factor)})
        for datum, factor in zip(batch, factors, strict=True)
    ]


def measure_pairs(logprobs: Array, reference: Array, loss: PairLoss, beta: float) -> dict[str, Measurement]:
    """What held-out pairs say, from their log-probs [2B].

    `loss`; `accuracy`, the fraction of pairs whose chosen answer is the more probable; `reward_accuracy`, the fraction
    whose gap is above 0, so that the policy has moved towards the chosen answer (a tie counts half, and all are ties
    before the first update); `margin`, beta times the gap: DPO's difference of implicit rewards.
    """
    gaps = pair_gaps(logprobs, reference)
    accuracies = {"accuracy": np.sign(logprobs[::2] - logprobs[1::2]), "reward_accuracy": np.sign(gaps)}
    return {
        "loss": Measurement(values=loss(gaps, beta)[0]),
        **{name: Measurement(values=(signs + 1) / 2) for name, signs in accuracies.items()},
        "margin": Measurement(values=beta * gaps),
    }
