"""Which tokens of a packed row may attend to which, as a function that FlexAttention evaluates block by block.

The rule is that of `attention_plan.document_mask`, without a matrix of all pairs of tokens.

Legend: L tokens of the row.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rl.data.packing import Document

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) indices -> whether the query may attend to the key."""


def segment_mask(documents: Sequence[Document], device: torch.device) -> MaskFunction:
    """The mask of a row of these documents. Its tensors lie on `device`."""
    document, suffix, opening = (
        torch.tensor(column).repeat_interleave(torch.tensor([size for *_, size in _segments(documents)])).to(device)
        for column in list(zip(*_segments(documents), strict=True))[:3]
    )

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch, head
        own = document[query] == document[key]
        in_reach = (suffix[key] == 0) | (suffix[query] == suffix[key])
        return (key <= query) & ((own & in_reach) | (key < opening[query]))

    return mask


def _segments(documents: Sequence[Document]) -> list[tuple[int, int, int, int]]:
    """Every prefix and suffix: its document, its number (0 for a prefix), the opening's tokens, its own tokens."""
    return [
        (index, number, document.opening, size)
        for index, document in enumerate(documents)
        for number, size in enumerate((document.prefix, *document.suffixes))
    ]
