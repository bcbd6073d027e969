"""What a step's summed gradient is divided by: functions that return `grad_scale` for `optim_step`.

Losses are sums, so the choice is the loop's, and may be made after every rollout batch of a step is known.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rl.checks import check_at_least
from rl.types import Datum


def token_mean(batch: Sequence[Datum]) -> float:
    """1 / the number of scored tokens: every token of a step counts the same, so that long completions count for more.

    DAPO, section 3.3 of https://arxiv.org/abs/2503.14476. Raises ValueError when nothing is scored.
    """
    num_tokens = sum(datum.num_loss_tokens for datum in batch)
    if num_tokens == 0:
        raise ValueError("token_mean was given a batch without a scored token; there is nothing to average over")
    return 1 / num_tokens


def constant_length(num_sequences: int, max_tokens: int) -> float:
    """1 / (sequences x tokens that each might have had), whatever was sampled.

    The gradient of a token does not depend on how long its completion, or any other, turned out: Dr. GRPO,
    https://arxiv.org/abs/2503.20783.
    """
    check_at_least(1, num_sequences=num_sequences, max_tokens=max_tokens)
    return 1 / (num_sequences * max_tokens)


def sequence_mean(batch: Sequence[Datum]) -> tuple[list[Datum], float]:
    """The batch with each datum's weights divided by its number of scored tokens, and 1 / the number of sequences.

    Every completion of a step counts the same, so that a token of a long one counts for less: GRPO as published, eq. 3
    of https://arxiv.org/abs/2402.03300. A datum that scores nothing is counted. Raises ValueError for an empty batch.
    """
    if len(batch) == 0:
        raise ValueError("sequence_mean was given an empty batch; there is nothing to average over")
    return [_weights_divided(datum, max(datum.num_loss_tokens, 1)) for datum in batch], 1 / len(batch)


def _weights_divided(datum: Datum, divisor: int) -> Datum:
    weights = datum.weights / np.float32(divisor)
    return replace(datum, loss_inputs={**datum.loss_inputs, "weights": weights})
