"""Which tokens of a packed row may attend to which, as a function that FlexAttention evaluates block by block.

The rule is that of `attention_plan.document_mask`, without a matrix of all pairs of tokens.

Legend: L tokens of the row.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rl.data.packing import Document

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) indices -> whether the query may attend to the key."""


def segment_mask(documents: Sequence[Document], device: torch.device) -> MaskFunction:
    """The mask of a row of these documents. Its tensors lie on `device`."""
    sizes = [document.num_tokens for document in documents]
    starts = np.cumsum((0, *sizes))
    until = np.concatenate([d.seen_until() + start for d, start in zip(documents, starts, strict=False)])
    opening = np.repeat([document.opening for document in documents], sizes)
    seen_until, opening_of = torch.from_numpy(until).to(device), torch.from_numpy(opening).to(device)

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch, head
        return (key <= query) & ((query < seen_until[key]) | (key < opening_of[query]))

    return mask
