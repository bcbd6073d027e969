"""How adapters are computed on the CPU; vLLM imports `generator.cpu.grouped_lora.GroupedLoRA` by name.

Shapes: N tokens of a step, S samples of it, L slots for adapters, R the maximum rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

_MAX_BATCHED_ROWS = 256  # above it, one product for each adapter is as fast, and copies less
_MAX_PADDING = 2.0  # rows that are multiplied at once, for each row that has to be


class GroupedLoRA(PunicaWrapperCPU):
    """Multiplies once for each adapter of a step, and leaves tokens without an adapter alone.

    vLLM 0.32 copies an adapter's weights once for every token: prefill is then 35 times as slow as without adapters. A
    token without an adapter has slot -1, which is the last slot for vLLM's kernels: as soon as every slot is taken, the
    model's own log-probs are wrong by some 0.3.

    Remove when `tests/generator/cpu/test_grouped_lora.py` says that vLLM's own kernels are right, if they are fast too.
    """

    def update_metadata(self, *args: Any, **kwargs: object) -> None:
        """Called by vLLM before a step, with the adapter of every token and of every sample."""
        super().update_metadata(*args, **kwargs)
        self._tokens = _Rows(self.token_lora_indices)
        self._samples = _Rows(self.sampler_indices)

    def add_lora_linear(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: object,
    ) -> None:
        """Adds B A x to y [N, all outputs]. A [L, 1, R, in] and B [L, 1, out, R] of each projection fused in y."""
        del kwargs
        assert scale == 1, "vLLM has multiplied B with it"
        assert sum(output_slices) == y.shape[-1]
        self._tokens.add_products(y, x, lora_a_stacked, lora_b_stacked)

    def add_lora_logits(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **kwargs: object,
    ) -> None:
        """Adds B A x to the logits y [S, padded vocabulary]. A [L, 1, R, hidden], B [L, 1, vocabulary, R]."""
        del kwargs
        assert scale == 1
        self._samples.add_products(y[:, : lora_b_stacked.shape[2]], x, [lora_a_stacked], [lora_b_stacked])


class _Rows:
    """Which rows of a step belong to which slot."""

    def __init__(self, slots: torch.Tensor) -> None:
        """`slots` [N] are the slots of the rows, -1 for none."""
        used, sizes = slots[slots >= 0].unique(return_counts=True)
        self._slots: list[int] = used.tolist()
        self._rows = [(slots == slot).nonzero()[:, 0] for slot in self._slots]
        self._batched = False
        if len(used) > 1 and sizes.sum() <= _MAX_BATCHED_ROWS:
            first, longest = self._slots[0], int(sizes.max())
            num_slots = self._slots[-1] + 1 - first
            self._batched = num_slots * longest <= _MAX_PADDING * int(sizes.sum())
            # Row `order[k]` is multiplied with slot `first + k // longest`; the other places are padding.
            self._order = torch.zeros(num_slots * longest, dtype=torch.long)
            self._range, self._shape = slice(first, first + num_slots), (num_slots, longest)
            starts = [(slot - first) * longest for slot in self._slots]
            self._places = torch.cat(
                [start + torch.arange(len(rows)) for start, rows in zip(starts, self._rows, strict=True)]
            )
            self._every = torch.cat(self._rows)
            self._order[self._places] = self._every

    def add_products(
        self, y: torch.Tensor, x: torch.Tensor, a_stacked: Sequence[torch.Tensor], b_stacked: Sequence[torch.Tensor]
    ) -> None:
        """Adds B A x of each projection to its part of y. In small steps all adapters' products are taken at once."""
        if self._batched:
            inputs = x.index_select(0, self._order).unflatten(0, self._shape)
            products = [
                torch.bmm(torch.bmm(inputs, a[self._range, 0].transpose(1, 2)), b[self._range, 0].transpose(1, 2))
                for a, b in zip(a_stacked, b_stacked, strict=True)
            ]
            product = _side_by_side(products).flatten(0, 1).index_select(0, self._places)
            y.index_add_(0, self._every, product.to(y.dtype))
            return
        for slot, rows in zip(self._slots, self._rows, strict=True):
            whole = len(rows) == len(x)
            inputs = x if whole else x.index_select(0, rows)
            products = [(inputs @ a[slot, 0].T) @ b[slot, 0].T for a, b in zip(a_stacked, b_stacked, strict=True)]
            if whole:
                for part, product in zip(y.split([each.shape[-1] for each in products], dim=-1), products, strict=True):
                    part.add_(product)
            else:  # adding rows to a part of y takes three times as long as adding them to the whole
                y.index_add_(0, rows, _side_by_side(products).to(y.dtype))


def _side_by_side(products: Sequence[torch.Tensor]) -> torch.Tensor:
    return products[0] if len(products) == 1 else torch.cat(list(products), dim=-1)
