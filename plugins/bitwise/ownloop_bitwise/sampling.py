"""The sampler's distribution by the kernels: log-softmax, temperature and cuts.

Legend: n samples, V tokens of the vocabulary, K tokens at most that the top-k of any of these samples leaves.
"""

import torch
from torch import Tensor

from generator.cpu.sampler import candidates
from ownloop_bitwise import ops

_GREEDY = 1e-5  # vLLM takes a lower temperature for greedy sampling


def log_softmax(logits: Tensor) -> Tensor:
    """The log-probs [n, V] of logits [n, V], in float32."""
    logits = logits.float()
    return logits - ops.log_sum_exp_rows(logits)[0][:, None]


def log_softmax_(logits: Tensor) -> Tensor:
    """As `log_softmax`, in the place of logits in float32."""
    return logits.sub_(ops.log_sum_exp_rows(logits)[0][:, None])


def apply_temperature(logits: Tensor, temp: Tensor, all_random: bool) -> Tensor:
    """Multiplies with the inverse, as the trainer does; vLLM divides."""
    temp = temp if all_random else torch.where(temp < _GREEDY, 1.0, temp)
    return logits.mul_((1 / temp)[:, None])


def cut(logits: Tensor, k: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """As the core's function of this name. What it keeps of a row depends on no other row.

    Of equal logits those of lower numbers go first. Sums of probabilities run by falling logits, and the sum of the
    log-softmax by the tokens' numbers, as in the trainer.
    """
    few, columns = candidates(logits, int(k.max()))
    values, places = few.sort(dim=-1, descending=True, stable=True)
    counts = ops.nucleus(values, k, p)
    values, places = (each[:, : int(k.max())] for each in (values, places))
    ids = places if columns is None else columns.gather(1, places)
    is_cut = torch.arange(values.shape[1]) >= counts[:, None]
    order = ids.masked_fill(is_cut, torch.iinfo(ids.dtype).max).argsort(dim=1)
    starts = torch.arange(len(values)) * values.shape[1]
    lse, _ = ops.log_sum_exp(values.gather(1, order), starts, starts + counts)
    return ids, (values - lse[:, None]).masked_fill_(is_cut, -torch.inf)
