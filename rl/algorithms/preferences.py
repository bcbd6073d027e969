"""Learning from preference pairs (DPO and its relatives) with a trainer whose losses are sums over tokens.

The loss of a pair is a function of the log-probs of its two answers, sums over their tokens:

    chosen:    p_c = sum of log policy(token)    rejected:  p_r

It couples two sequences that may be computed in different micro-batches or on different ranks. Its gradient does not:
by the chain rule it is d loss / d p_c times the gradient of one sum of log-probs, plus d loss / d p_r times that of the
other. So a step takes the log-probs by `forward`, computes these two slopes in the controller, and calls
`cross_entropy` with minus the slope as the weight of each token of an answer. That is the exact gradient, however the
batch is cut.

A reward model is trained likewise: its answers' scores are values of a value head in place of sums of log-probs.

Legend: B pairs; a batch of pairs is 2B datums, in the order chosen, rejected, chosen, rejected, ...
"""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray

from rl.advantages import gather_scored
from rl.configuration import NotNegative, Positive, configuration, one_of
from rl.data.sources import Preference, text_to_datum
from rl.losses.shared import LossFunction, LossInputs, Metrics
from rl.protocols import Trainer
from rl.rollouts.evaluation import Measurement
from rl.rollouts.rendering import Renderer
from rl.system.disk import write_json
from rl.types import Datum, Head

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """What a loss of pairs reads of a batch."""

    logprobs: Array
    """[2B] sums of the policy's log-probs, or a reward model's values."""
    reference: Array | None
    """[2B] sums of the reference's; None for a loss that has no reference."""
    lengths: Array
    """[2B] numbers of scored tokens; 1 for a reward model."""

    def rewards(self, beta: float) -> Array:
        """[2B] implicit rewards: beta log(policy / reference), or beta times the mean log-prob without a reference."""
        if self.reference is None:
            return beta * self.logprobs / self.lengths
        return beta * (self.logprobs - self.reference)


PairFunction = Callable[..., tuple[Array, Array]]
"""(pairs, beta, perhaps a margin) -> losses [B], and slopes [2B]: the derivative of their sum by each log-prob."""


def dpo(pairs: Pairs, beta: float, margin: float = 0.0) -> tuple[Array, Array]:
    """-log sigmoid(reward_c - reward_r - margin): direct preference optimisation.

    Eq. 7 of https://arxiv.org/abs/2305.18290. The margin is the constant offset of https://arxiv.org/abs/2402.10571.
    """
    rewards = pairs.rewards(beta)
    losses, slopes = _logistic(rewards[::2] - rewards[1::2] - margin)
    return losses, _both(beta * slopes, -beta * slopes)


def simpo(pairs: Pairs, beta: float, margin: float = 0.0) -> tuple[Array, Array]:
    """`dpo` with the mean log-prob of a token as the reward and no reference: eq. 6 of https://arxiv.org/abs/2405.14734.

    The paper takes beta from 2 to 10 and a margin of 0.3 to 0.6 times beta.
    """
    losses, slopes = dpo(replace(pairs, reference=None), beta, margin)
    return losses, slopes / pairs.lengths


def ipo(pairs: Pairs, beta: float) -> tuple[Array, Array]:
    """(h - 1 / (2 beta))^2 for the difference h of log-ratios: eq. 17 of https://arxiv.org/abs/2310.12036."""
    ratios = pairs.rewards(1.0)
    distance = ratios[::2] - ratios[1::2] - 1 / (2 * beta)
    return distance**2, _both(2 * distance, -2 * distance)


def kto(pairs: Pairs, beta: float) -> tuple[Array, Array]:
    """2 - sigmoid(reward_c - z_r) - sigmoid(z_c - reward_r): the loss of KTO, https://arxiv.org/abs/2402.01306.

    z_c and z_r are the mean rewards of the batch's chosen and rejected answers, at least 0, without a gradient. The
    paper takes one point of reference, from answers to other prompts; a batch of pairs has none, so each side is
    compared with the other one's mean, as in the paper's own code for pairs.
    """
    rewards = pairs.rewards(beta)
    chosen, rejected = rewards[::2], rewards[1::2]
    good = _sigmoid(chosen - max(rejected.mean(), 0.0))
    bad = _sigmoid(max(chosen.mean(), 0.0) - rejected)
    return 2 - good - bad, _both(-beta * good * (1 - good), beta * bad * (1 - bad))


def orpo(pairs: Pairs, beta: float) -> tuple[Array, Array]:
    """-m_c + beta * -log sigmoid(log odds_c - log odds_r): eq. 6 of https://arxiv.org/abs/2403.07691.

    m is the mean log-prob of an answer's tokens, and its odds are exp(m) / (1 - exp(m)). The paper's lambda is beta.
    """
    means = np.minimum(pairs.logprobs / pairs.lengths, -1e-9)  # the odds of a certain answer are infinite
    complements = -np.expm1(means)  # 1 - exp(m)
    odds = means - np.log(complements)
    losses, slopes = _logistic(odds[::2] - odds[1::2])
    by_mean = _both(beta * slopes, -beta * slopes) / complements  # d log odds / d m = 1 / (1 - exp(m))
    by_mean[::2] -= 1
    return beta * losses - means[::2], by_mean / pairs.lengths


def bradley_terry(pairs: Pairs, beta: float, margin: float = 0.0) -> tuple[Array, Array]:
    """-log sigmoid(beta (value_c - value_r) - margin) trains a reward model: https://arxiv.org/abs/1706.03741.

    The values are those after the answers' last tokens, of a trainer with `head="value"`. The usual beta is 1.
    """
    return simpo(pairs, beta, margin)


def _logistic(x: Array) -> tuple[Array, Array]:
    """-log sigmoid(x) and its derivative, without overflow."""
    return np.logaddexp(0, -x), -_sigmoid(-x)


def _sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0, -x))


def _both(chosen: Array, rejected: Array) -> Array:
    """Two arrays [B] -> [2B] in the order of a batch of pairs."""
    return np.stack([chosen, rejected], axis=1).ravel()


PAIR_LOSSES: Mapping[str, PairFunction] = {
    "bradley_terry": bradley_terry,
    "dpo": dpo,
    "ipo": ipo,
    "kto": kto,
    "orpo": orpo,
    "simpo": simpo,
}
"""Losses of pairs by the name that a recipe uses."""
WITHOUT_REFERENCE = frozenset({"bradley_terry", "orpo", "simpo"})
WITH_MARGIN = frozenset({"bradley_terry", "dpo", "simpo"})


def weighted_values(scores: "Tensor", entropy: "Tensor | None", inputs: LossInputs) -> tuple["Tensor", Metrics]:
    """-sum w V: what `cross_entropy` is to log-probs, for the values [S] of a value head."""
    del entropy
    return -(inputs.weights * scores).sum(), {}


@configuration
class PairLoss:
    """A loss of pairs with its options."""

    name: Annotated[str, one_of(lambda: PAIR_LOSSES)]
    """A row of `PAIR_LOSSES`."""
    beta: Positive
    margin: NotNegative = 0.0
    head: Head = "lm"
    """The trainer's: "value" for a reward model."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        if self.margin and self.name not in WITH_MARGIN:
            raise ValueError(f"margin is {self.margin}, but loss {self.name!r} has none; leave it at 0")
        needed = "value" if self.name == "bradley_terry" else "lm"
        if self.head != needed:
            raise ValueError(f"trainer.head is {self.head!r}; loss {self.name!r} needs {needed!r}")

    @property
    def token_loss(self) -> str | LossFunction:
        """The loss of `forward_backward` whose gradient, with the weights of `weight_pairs`, is that of the pairs."""
        return weighted_values if self.head == "value" else "cross_entropy"

    def data(self, renderer: Renderer, preferences: Sequence[Preference], *, max_tokens: int) -> list[Datum]:
        """Preference pairs -> [2B] datums that score the answer and its end token; a reward model, the last token only.

        A pair is left out if either of its sequences has more than `max_tokens` tokens.
        """
        batch: list[Datum] = []
        for preference in preferences:
            prompt = renderer.encode(preference.prompt)
            answers = [
                renderer.encode_completion(preference.prompt, a) for a in (preference.chosen, preference.rejected)
            ]
            if len(prompt) + max(map(len, answers)) <= max_tokens:
                batch += [self._datum(prompt, answer) for answer in answers]
        return batch

    def _datum(self, prompt: Sequence[int], answer: Sequence[int]) -> Datum:
        if self.head == "lm":
            return text_to_datum(prompt, answer, "completion")
        # The value after the last token; as its target any token will do, which a value head does not read.
        return text_to_datum([*prompt, *answer], answer[-1:], "completion")

    def __call__(self, pairs: Pairs) -> tuple[Array, Array]:
        """Losses [B], and slopes [2B]: the derivative of the sum of the losses by each answer's log-prob."""
        margin = {"margin": self.margin} if self.name in WITH_MARGIN else {}
        return PAIR_LOSSES[self.name](pairs, self.beta, **margin)

    def measure(self, pairs: Pairs) -> dict[str, Measurement]:
        """One value of each pair.

        `loss`; `accuracy`, 1 where the chosen answer is the more probable one; `reward_accuracy`, 1 where it has the
        higher implicit reward, so that with a reference the policy has moved towards it; `margin`, the difference of
        these rewards. A tie counts half. With a reference, every pair is a tie before the first update.
        """
        rewards = pairs.rewards(self.beta)
        differences = rewards[::2] - rewards[1::2]
        more_probable = np.sign(pairs.logprobs[::2] - pairs.logprobs[1::2])
        return {
            "loss": Measurement(values=self(pairs)[0]),
            "accuracy": Measurement(values=(more_probable + 1) / 2),
            "reward_accuracy": Measurement(values=(np.sign(differences) + 1) / 2),
            "margin": Measurement(values=differences),
        }


async def sequence_scores(trainer: Trainer, batch: Sequence[Datum]) -> Array:
    """[D] sum of the log-probs, or values, of each datum's scored tokens; an empty array for an empty batch."""
    if not batch:  # a trainer refuses an empty batch
        return np.zeros(0)
    output = await trainer.forward(batch)
    scores = output.logprobs if output.values is None else output.values
    return np.array([of_datum.sum(dtype=np.float64) for of_datum in gather_scored(batch, scores)])


async def score_pairs(trainer: Trainer, batch: Sequence[Datum], reference: Array | None) -> Pairs:
    """The batch [2B] under the current weights. `reference` is the batch's entry of `reference_logprobs`."""
    lengths = np.array([datum.num_loss_tokens for datum in batch], np.float64)
    return Pairs(logprobs=await sequence_scores(trainer, batch), reference=reference, lengths=lengths)


async def reference_logprobs(
    trainer: Trainer, batches: Iterable[Sequence[Datum]], file: Path, loss: PairLoss
) -> list[Array | None]:
    """`sequence_scores` of every batch, cached in a file. Batches that the file already covers are not computed.

    Called before the first update, the policy serves as its own reference, so that no second model is needed. A resumed
    run, whose policy has been updated, finds all values in the file. For a loss without a reference all are None.
    """
    if loss.name in WITHOUT_REFERENCE:
        return [None for _ in batches]
    rows: list[list[float]] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    new = [await sequence_scores(trainer, batch) for batch in itertools.islice(batches, len(rows), None)]
    if new:
        rows += [row.tolist() for row in new]
        write_json(file, rows)
    return [np.array(row) for row in rows]


def weight_pairs(batch: Sequence[Datum], slopes: Array) -> list[Datum]:
    """The batch weighted so that `PairLoss.token_loss` has the gradient of the pairs' losses. Both have 2B entries."""
    # The token losses are -sum w * p, so the weight is minus the slope.
    return [datum.weighted(-slope) for datum, slope in zip(batch, slopes, strict=True)]
