"""Memory for logits on the CPU, which a thread uses for every row.

The kernel clears memory that is new to a process, which takes longer than to fill it; and chunks, which differ in size
from row to row, would leave holes on the heap into which larger ones do not fit.

Legend: S scored positions of a row, C positions of a chunk, V vocabulary rows.
"""

import threading

import torch
from torch import Tensor


class LogitsMemory(threading.local):
    """The memory of one thread, for one row at a time."""

    def __init__(
        self, *, chunk_bytes: int = 128 << 20, block_bytes: int = 6 << 20, kept_bytes: int = 512 << 20
    ) -> None:
        """Takes no memory yet.

        `chunk_bytes` and `block_bytes` are the sizes of the float32 logits of one chunk, for which more would save
        nothing, and of one block. `kept_bytes` is the size of the logits that a forward pass leaves for its backward
        pass, in the dtype of the weights: those of 5,461 positions of a vocabulary of 49,152 words in bfloat16. Later
        positions are computed again.
        """
        self.chunk_bytes, self.block_bytes, self._kept_bytes = chunk_bytes, block_bytes, kept_bytes
        self._block, self._chunk, self._kept = (torch.empty(0, dtype=torch.uint8) for _ in range(3))
        self._key: object = None
        self._logits = torch.empty(0)

    def block(self, num_positions: int, rows: int) -> Tensor:
        """[C, V] float32 whose content is whatever was there."""
        num_bytes = num_positions * rows * 4
        self._block = _grown(self._block, num_bytes)
        return self._block[:num_bytes].view(torch.float32).view(num_positions, rows)

    def chunk(self, num_positions: int, weight: Tensor, at_least: int) -> Tensor:
        """[C, V] in the dtype of `weight` [V, D], whose content is whatever was there.

        `at_least` is the number of logits of later calls.
        """
        num_logits = num_positions * len(weight)
        self._chunk = _grown(self._chunk, max(num_logits, at_least) * weight.element_size())
        return self._chunk.view(weight.dtype)[:num_logits].view(num_positions, len(weight))

    def keep(self, size: int, weight: Tensor) -> object:
        """Prepares for the logits [S, V] of a new row, and forgets those of another one. Returns the key to them."""
        num_positions = min(size, self._kept_bytes // (weight.shape[0] * weight.element_size()))
        num_bytes = num_positions * weight.shape[0] * weight.element_size()
        if num_bytes:
            # In powers of two, because each growth leaves a hole. Pages that are never written to take no memory.
            self._kept = _grown(self._kept, 1 << (num_bytes - 1).bit_length())
        self._logits = self._kept[:num_bytes].view(weight.dtype).view(num_positions, weight.shape[0])
        self._key = object()
        return self._key

    def num_kept(self, key: object) -> int:
        """How many positions' logits there is room for; none if another row has taken it."""
        return len(self._logits) if key is not None and key is self._key else 0

    def kept(self, key: object, part: slice) -> Tensor | None:
        """The memory of a chunk's logits [C, V]; None if there is no room, or another row has taken it."""
        return self._logits[part] if part.stop <= self.num_kept(key) else None

    def forget(self, key: object) -> None:
        """The logits of this row are there no longer."""
        if key is self._key:
            self._key = None


def _grown(memory: Tensor, num_bytes: int) -> Tensor:
    """Memory of at least so many bytes, whose content may be lost."""
    return memory if len(memory) >= num_bytes else torch.empty(num_bytes, dtype=torch.uint8)
