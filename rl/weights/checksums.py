"""Checksums of published tensors: sums of their bits, which cost next to nothing compared with copying the tensors.

They catch tensors that were written wrongly, not written, or overwritten. They do not protect against an attacker, and
do not notice values that only changed places.
"""

from collections.abc import Iterable, Sequence

import torch

LINE_BYTES = 64
"""Every tensor in a buffer begins at a multiple of this and is padded with zeros to the next."""

_MODULUS = 1 << 64
_SAMPLED_LINES = 64
_SPREAD = 40503  # 2^16 / golden ratio: samples differ in their column, whatever the width of a row


class BufferChecksums:
    """Checksums of the tensors of a buffer: sums of their 64-bit words, modulo 2^64.

    Full checksums cover every byte. Sampled ones cover 64 lines of 64 bytes of a tensor above 4 KiB, spread over all of
    it so that every rank's shard is sampled; a single wrong word elsewhere goes unnoticed.
    """

    def __init__(self, extents: Sequence[tuple[int, int]], *, full: bool) -> None:
        """`extents` holds every tensor's first byte and its number of bytes."""
        self._lines = [(offset // LINE_BYTES, -(-size // LINE_BYTES)) for offset, size in extents]
        self._full = full
        if not full:
            sampled = [first + _sample(num_lines) for first, num_lines in self._lines]
            self._sampled = torch.cat([torch.zeros(0, dtype=torch.int64), *sampled])
            self._owners = torch.repeat_interleave(torch.tensor([len(lines) for lines in sampled], dtype=torch.int64))

    def __call__(self, data: torch.Tensor) -> tuple[int, ...]:
        """The checksum of every tensor, from a buffer's bytes (uint8 [N], N a multiple of 64)."""
        lines = data.view(torch.int64).view(-1, LINE_BYTES // 8)
        if not self._lines:
            return ()
        if self._full:
            return tuple(torch.stack([lines[first : first + count].sum() for first, count in self._lines]).tolist())
        if self._sampled.device != data.device:
            self._sampled, self._owners = self._sampled.to(data.device), self._owners.to(data.device)
        sums = torch.zeros(len(self._lines), dtype=torch.int64, device=data.device)
        return tuple(sums.index_add_(0, self._owners, lines.index_select(0, self._sampled).sum(1)).tolist())


def element_sum(tensor: torch.Tensor) -> int:
    """The sum of the bit patterns of a tensor's elements. Ranks that hold its shards can `add_up` theirs."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return int(tensor.contiguous().view(bits).sum(dtype=torch.int64)) % _MODULUS


def add_up(sums: Iterable[int]) -> int:
    """The `element_sum` of a tensor, from those of its shards."""
    return sum(sums) % _MODULUS


def _sample(num_lines: int) -> torch.Tensor:
    """The lines of a tensor that sampled checksums cover."""
    if num_lines <= _SAMPLED_LINES:
        return torch.arange(num_lines)
    positions = torch.arange(_SAMPLED_LINES)
    begins = positions * num_lines // _SAMPLED_LINES
    widths = (positions + 1) * num_lines // _SAMPLED_LINES - begins
    return begins + positions * _SPREAD % widths
