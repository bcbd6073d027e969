"""Has the adapters (LoRA) of one vLLM engine on the CPU computed by the kernels. Written against vLLM 0.32.

A token's row y of a projection becomes y + (x A^T) B^T, both products rounded, of the token's own adapter. vLLM has
multiplied B with the scale, and pads A and B with zeros to the largest rank, which changes no sum.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ownloop_bitwise import ops

Rows = list[tuple[int, Tensor]]
"""The slots of a step's adapters, and the rows [n] of each."""


class BitwiseAdapters:
    """Takes the place of what `GroupedLoRA` computes. Keeps the packed A and B of each slot."""

    def __init__(self, manager: Any) -> None:
        """`manager` is vLLM's of the engine's adapters."""
        (self._wrapper,) = manager.punica_wrapper_mapping.values()
        self._activate, self._update = manager.activate_adapter, self._wrapper.update_metadata
        self._packed: dict[tuple[int, int], ops.Packed] = {}
        self._tokens: Rows = []
        self._samples: Rows = []
        manager.activate_adapter = self._activate_adapter
        self._wrapper.update_metadata = self._update_metadata
        self._wrapper.add_lora_linear = self._add_lora_linear
        self._wrapper.add_lora_logits = self._add_lora_logits

    def _activate_adapter(self, number: int) -> bool:
        """As the method that it replaces, which copies an adapter's weights into a slot."""
        activated: bool = self._activate(number)
        if activated:
            self._packed.clear()
        return activated

    def _update_metadata(self, *args: object, **kwargs: object) -> None:
        self._update(*args, **kwargs)
        self._tokens = _by_slot(self._wrapper.token_lora_indices)
        self._samples = _by_slot(self._wrapper.sampler_indices)

    def _add_lora_linear(
        self, y: Tensor, x: Tensor, a_stacked: Sequence[Tensor], b_stacked: Sequence[Tensor], *_: object, **__: object
    ) -> None:
        self._add(y, x, self._tokens, a_stacked, b_stacked)

    def _add_lora_logits(
        self, y: Tensor, x: Tensor, a_stacked: Tensor, b_stacked: Tensor, *_: object, **__: object
    ) -> None:
        self._add(y[:, : b_stacked.shape[2]], x, self._samples, [a_stacked], [b_stacked])

    def _add(
        self, y: Tensor, x: Tensor, groups: Rows, a_stacked: Sequence[Tensor], b_stacked: Sequence[Tensor]
    ) -> None:
        """Adds to y [N, all outputs]. A [slots, 1, R, in] and B [slots, 1, out, R] of each projection fused in y."""
        for slot, rows in groups:
            inputs = x.index_select(0, rows)
            parts = [
                ops.product(ops.product(inputs, self._pack(a, slot)), self._pack(b, slot))
                for a, b in zip(a_stacked, b_stacked, strict=True)
            ]
            y.index_copy_(0, rows, y.index_select(0, rows) + torch.cat(parts, -1))

    def _pack(self, stack: Tensor, slot: int) -> ops.Packed:
        key = (stack.data_ptr(), slot)
        if key not in self._packed:
            self._packed[key] = ops.Packed.of(stack[slot, 0])
        return self._packed[key]


def _by_slot(slots: Tensor) -> Rows:
    """Of the slots [N] of a step's rows, -1 for none."""
    return [(slot, (slots == slot).nonzero()[:, 0]) for slot in slots.unique().tolist() if slot >= 0]
