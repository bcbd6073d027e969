"""Learning from preference pairs (DPO, IPO) with a trainer whose losses are sums over tokens.

The loss of a pair is a function of its log-ratio difference:

    h = log(policy / reference)(chosen) - log(policy / reference)(rejected)

It couples two sequences that may be computed in different micro-batches or on different ranks. Its gradient does not:
by the chain rule it is the slope d loss / d h times the difference of the gradients of two sums of log-probs. So a step
takes the log-probs by `forward`, computes the slopes in the controller, and calls `cross_entropy` with the weight
-slope on the tokens of the chosen answer and +slope on the tokens of the rejected one. That is the exact gradient,
however the batch is cut.

Legend: B pairs; a batch of pairs is 2B datums, in the order chosen, rejected, chosen, rejected, ...
"""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rl.advantages import gather_scored
from rl.data.sources import Preference, text_to_datum
from rl.protocols import Trainer
from rl.rollouts.evaluation import Measurement
from rl.rollouts.rendering import Renderer
from rl.system.disk import write_json
from rl.types import Datum

Array = NDArray[np.float64]
PairLoss = Callable[[Array, float], tuple[Array, Array]]
"""(log-ratio differences h [B], beta) -> losses [B] and their slopes, d loss / d h [B]."""


def dpo(differences: Array, beta: float) -> tuple[Array, Array]:
    """-log sigmoid(beta h): direct preference optimisation, eq. 7 of https://arxiv.org/abs/2305.18290."""
    # logaddexp(0, x) is log(1 + exp(x)) without overflow; -beta * exp(-...) is -beta * sigmoid(-beta h).
    return np.logaddexp(0, -beta * differences), -beta * np.exp(-np.logaddexp(0, beta * differences))


def ipo(differences: Array, beta: float) -> tuple[Array, Array]:
    """(h - 1 / (2 beta))^2: pulls h towards a finite target. Eq. 17 of https://arxiv.org/abs/2310.12036."""
    distance = differences - 1 / (2 * beta)
    return distance**2, 2 * distance


PAIR_LOSSES: Mapping[str, PairLoss] = {"dpo": dpo, "ipo": ipo}
"""Pair losses by the name that a recipe uses."""


def preferences_to_data(renderer: Renderer, preferences: Sequence[Preference], *, max_tokens: int) -> list[Datum]:
    """Preference pairs -> [2B] datums that score the answer and its end token.

    A pair is left out if either of its sequences has more than `max_tokens` tokens.
    """
    batch: list[Datum] = []
    for preference in preferences:
        prompt = renderer.encode(preference.prompt)
        answers = [renderer.encode_completion(preference.prompt, a) for a in (preference.chosen, preference.rejected)]
        if len(prompt) + max(map(len, answers)) <= max_tokens:
            batch += [text_to_datum(prompt, answer, "completion") for answer in answers]
    return batch


async def sequence_logprobs(trainer: Trainer, batch: Sequence[Datum]) -> Array:
    """[D] sum of the log-probs of each datum's scored tokens; an empty array for an empty batch."""
    if not batch:  # a trainer refuses an empty batch
        return np.zeros(0)
    output = await trainer.forward(batch)
    return np.array([logprobs.sum(dtype=np.float64) for logprobs in gather_scored(batch, output.logprobs)])


async def reference_logprobs(trainer: Trainer, batches: Iterable[Sequence[Datum]], file: Path) -> list[Array]:
    """`sequence_logprobs` of every batch, cached in a file. Batches that the file already covers are not computed.

    Called before the first update, the policy serves as its own reference, so that no second model is needed. A resumed
    run, whose policy has been updated, finds all values in the file.
    """
    rows: list[list[float]] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    new = [await sequence_logprobs(trainer, batch) for batch in itertools.islice(batches, len(rows), None)]
    if new:
        rows += [row.tolist() for row in new]
        write_json(file, rows)
    return [np.array(row) for row in rows]


def log_ratio_differences(logprobs: Array, reference: Array) -> Array:
    """[2B] log-probs of the policy and of the reference -> [B] log-ratio differences h."""
    ratios = logprobs - reference
    return ratios[::2] - ratios[1::2]


def weight_pairs(batch: Sequence[Datum], slopes: Array) -> list[Datum]:
    """The batch [2B] weighted so that `cross_entropy` has the gradient of the pair losses. `slopes` is [B]."""
    # cross_entropy is -sum w * p, so the chosen answer's weight is minus the slope.
    factors = np.stack([-slopes, slopes], axis=1).ravel()
    return [datum.weighted(factor) for datum, factor in zip(batch, factors, strict=True)]


def measure_pairs(logprobs: Array, reference: Array, loss: PairLoss, beta: float) -> dict[str, Measurement]:
    """Measurements of pairs, from their log-probs [2B] under the policy and the reference.

    `loss`; `accuracy`, the fraction of pairs whose chosen answer is the more probable one; `reward_accuracy`, the
    fraction with h above 0, where the policy has moved towards the chosen answer; `margin`, beta * h, which is DPO's
    difference of implicit rewards. A tie counts half. Before the first update every h is 0, hence a tie.
    """
    differences = log_ratio_differences(logprobs, reference)
    accuracies = {"accuracy": np.sign(logprobs[::2] - logprobs[1::2]), "reward_accuracy": np.sign(differences)}
    return {
        "loss": Measurement(values=loss(differences, beta)[0]),
        **{name: Measurement(values=(signs + 1) / 2) for name, signs in accuracies.items()},
        "margin": Measurement(values=beta * differences),
    }
