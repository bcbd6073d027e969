"""Normalisers of a step's summed gradient: functions that return the `grad_scale` of `optim_step`.

Losses are sums, so the loop chooses the normaliser, and can do so after all rollout batches of a step are known.
"""

from collections.abc import Sequence

from rl.checks import check_at_least
from rl.types import Datum


def token_mean(batch: Sequence[Datum]) -> float:
    """1 / (number of scored tokens): every token of a step counts the same, so long completions count for more.

    DAPO, section 3.3 of https://arxiv.org/abs/2503.14476. Raises ValueError if the batch has no scored token.
    """
    num_tokens = sum(datum.num_loss_tokens for datum in batch)
    if num_tokens == 0:
        raise ValueError("token_mean was given a batch without a scored token; there is nothing to average over")
    return 1 / num_tokens


def constant_length(num_sequences: int, max_tokens: int) -> float:
    """1 / (num_sequences * max_tokens), a constant whatever was sampled.

    So the weight of a token does not depend on the length of its completion, nor on that of any other: Dr. GRPO,
    https://arxiv.org/abs/2503.20783.
    """
    check_at_least(1, num_sequences=num_sequences, max_tokens=max_tokens)
    return 1 / (num_sequences * max_tokens)


def sequence_mean(batch: Sequence[Datum]) -> tuple[list[Datum], float]:
    """The batch with each datum's weights divided by its number of scored tokens, and 1 / (number of datums).

    Every completion of a step counts the same, so a token of a long one counts for less: GRPO as published, eq. 3 of
    https://arxiv.org/abs/2402.03300. Datums without scored tokens are counted. Raises ValueError for an empty batch.
    """
    if len(batch) == 0:
        raise ValueError("sequence_mean was given an empty batch; there is nothing to average over")
    return [datum.weighted(1 / max(datum.num_loss_tokens, 1)) for datum in batch], 1 / len(batch)
