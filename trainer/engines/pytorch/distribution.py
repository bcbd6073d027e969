"""The distribution that each scored pair of a row is scored under: the one that its token was sampled from.

Logits are divided by the temperature, and only the tokens that the sampler kept have a probability. A model that is
sure of itself keeps few, so a chunk of positions is multiplied with the rows of the vocabulary that its sets have, not
with all. Legend: C positions of a chunk, U different tokens of their sets, k tokens of all sets together."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rl.data.packing import PackedRow
from rl.sampling import KeptSets
from trainer.engines.pytorch.row_runner import to_tensor

_IMPOSSIBLE = -1e30
"""The logit of a token that was cut off: its exponential is 0, and unlike that of -inf, its product with 0 is 0."""


class ScoreKernels(Protocol):
    """Computes logits and their sums in another way than PyTorch. Shapes and dtypes are those of `logprobs.py`."""

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
        """hidden [C, D] and weight [V, D], or `inner` and B -> logits [C, V], in `out` if that is given."""
        ...

    def capped(self, logits: Tensor, cap: float) -> Tensor:
        """cap * tanh(logits / cap), in the place of the logits."""
        ...

    def softmax_sums(
        self, tokens: "ChunkTokens | None", logits: Tensor, entropy: bool, scale: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """As `sums_of_rows`; with `tokens`, only these have a probability."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """What is done to the logits of scored pairs. FSDP casts the tensors of a model's inputs, but not these."""

    scale: Tensor | None = None
    """[P] float32, what logits are multiplied by: the inverse temperatures. None if all are 1."""
    kept: KeptSets | None = None
    """P sets. None if all stand for the whole vocabulary."""
    widened: bool = False
    """Whether logits are products in float32 of what may be in a narrower dtype (`TrainerConfig.head_dtype`)."""
    kernels: ScoreKernels | None = None
    """What computes the logits and their sums; None for PyTorch."""

    @classmethod
    def of_row(cls, row: PackedRow, device: torch.device, head_dtype: str | None) -> "Distribution":
        """The distribution of a row's scored pairs, on the device."""
        scale = None if (row.temperatures == 1).all() else to_tensor(1 / row.temperatures, device)
        kept = row.kept if row.kept is not None and row.kept.counts.any() else None
        return cls(scale, kept, widened=head_dtype == "float32")

    def widen(self, tensor: Tensor) -> Tensor:
        """An operand of the logits' product in the dtype that it is computed in."""
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if self.widened else tensor

    def at(self, where: Tensor) -> "Distribution":
        """That of the pairs with these indices."""
        return Distribution(
            None if self.scale is None else self.scale[where],
            None if self.kept is None else self.kept.take(where.cpu().numpy()),
            self.widened,
            self.kernels,
        )


MODEL_DISTRIBUTION = Distribution()
"""The model's own: the whole vocabulary at temperature 1."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTokens:
    """The tokens of a chunk's kept sets among the rows of the vocabulary that a rank holds."""

    rows: Tensor | None
    """[U] their rows, rising. A rank that holds none of them has one that no set has; None stands for all rows."""
    positions: Tensor
    """[k] the position that each token of a set belongs to."""
    columns: Tensor
    """[k] the place of that token in `rows`."""

    @classmethod
    def of(cls, kept: KeptSets, first_row: int, num_rows: int, device: torch.device, *, gathers: bool) -> "ChunkTokens":
        """Of C sets, for a rank that holds the tokens `first_row` to `first_row + num_rows - 1`.

        Only with `gathers`, some rows are chosen.
        """
        ids = kept.ids.astype(np.int64) - first_row
        here = (ids >= 0) & (ids < num_rows)
        positions, columns = np.repeat(np.arange(len(kept)), kept.counts)[here], ids[here]
        if not gathers:
            return cls(None, to_tensor(positions, device), to_tensor(columns, device))
        rows, columns = np.unique(columns, return_inverse=True)
        rows = rows if len(rows) else np.zeros(1, np.int64)
        return cls(*(to_tensor(array, device) for array in (rows, positions, columns)))

    def restrict_(self, logits: Tensor) -> Tensor:
        """Takes every logit of [C, U] away but for the tokens of each position's own set."""
        kept = logits[self.positions, self.columns]
        logits.fill_(_IMPOSSIBLE)
        logits[self.positions, self.columns] = kept
        return logits

    def of_tensor(self, tensor: Tensor) -> Tensor:
        """The tokens' rows [U, ...] of a tensor with a row for each token that is held here."""
        return tensor if self.rows is None else tensor.index_select(0, self.rows)


def local_targets(rows: Tensor, num_rows: int, tokens: ChunkTokens | None) -> tuple[Tensor, Tensor]:
    """Column of each target, given its row [C], and 1.0 where the row is held here; elsewhere both are 0."""
    if tokens is not None and tokens.rows is not None:
        column = torch.searchsorted(tokens.rows, rows).clamp_(max=len(tokens.rows) - 1)
        here = tokens.rows[column] == rows
        return column * here, here.float()
    here = (rows >= 0) & (rows < num_rows)
    return rows * here, here.float()


def sums_of_rows(logits: Tensor, entropy: bool, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Of logits [C, V] times scale [C], log of the sum of exponentials and, for entropies, the expected logit."""
    z = _exact(logits, scale)
    log_sum = z.logsumexp(-1)
    return log_sum, ((z - log_sum[:, None]).exp() * z).sum(-1) if entropy else None


def gradient_of_rows(
    logits: Tensor,
    lse: Tensor,
    grad_logprobs: Tensor,
    column: Tensor,
    here: Tensor,
    of_entropy: tuple[Tensor, Tensor] | None,
    scale: Tensor | None,
    cap: float | None,
) -> Tensor:
    """The gradient of logits [C, V], as in `logprobs.py`, but a target is found by comparing columns."""
    log_p = _exact(logits, scale) - lse[:, None]
    grad = -grad_logprobs[:, None] * log_p.exp()
    if of_entropy is not None:
        grad = grad - of_entropy[0][:, None] * (log_p + of_entropy[1][:, None]) * log_p.exp()
    is_target = torch.arange(logits.shape[1], device=logits.device) == column[:, None]
    grad = grad + is_target * (grad_logprobs * here)[:, None]
    if scale is not None:
        grad = grad * scale[:, None]
    if cap is not None:
        grad = grad * (1 - (logits.to(grad.dtype).clamp(-cap, cap) / cap).square())
    return grad.to(logits.dtype)


def _exact(logits: Tensor, scale: Tensor | None) -> Tensor:
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return exact if scale is None else exact * scale[:, None]


@functools.cache
def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """`sums_of_rows` or `gradient_of_rows` as one kernel, which reads each logit once, for chunks of any size."""
    return torch.compile(function, dynamic=True)
