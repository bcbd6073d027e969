"""How adapters are computed on the CPU; vLLM imports `generator._cpu_lora.GroupedLoRA` by name.

Shapes: N tokens of a step, S samples of it, L slots for adapters, R the maximum rank.
"""

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

Rows = slice | torch.Tensor


class GroupedLoRA(PunicaWrapperCPU):
    """Multiplies once for each adapter of a step, and leaves tokens without an adapter alone.

    vLLM 0.32 copies an adapter's weights once for every token: prefill is then 35 times as slow as without adapters. A
    token without an adapter has slot -1, which is the last slot for vLLM's kernels: as soon as every slot is taken, the
    model's own log-probs are wrong by some 0.3.

    Remove when `tests/generator/test_cpu_lora.py` says that vLLM's own kernels are right and fast.
    """

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Called by vLLM before a step, with the adapter of every token and of every sample."""
        super().update_metadata(*args, **kwargs)
        self._tokens = _rows_by_slot(self.token_lora_indices)
        self._samples = _rows_by_slot(self.sampler_indices)

    def add_lora_linear(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """Adds B A x to y [N, all outputs]. A [L, 1, R, in] and B [L, 1, out, R] of each projection fused in y."""
        del kwargs
        assert scale == 1, "vLLM has multiplied B with it"
        for slot, rows in self._tokens.items():
            inputs, outputs = x[rows], y[rows]
            parts = outputs.split(output_slices, dim=-1)
            for part, a, b in zip(parts, lora_a_stacked, lora_b_stacked, strict=True):
                part.add_((inputs @ a[slot, 0].T) @ b[slot, 0].T)
            if isinstance(rows, torch.Tensor):
                y[rows] = outputs  # indexing with a tensor has copied them

    def add_lora_logits(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **kwargs: Any,
    ) -> None:
        """Adds B A x to the logits y [S, padded vocabulary]. A [L, 1, R, hidden], B [L, 1, vocabulary, R]."""
        del kwargs
        assert scale == 1
        for slot, rows in self._samples.items():
            b = lora_b_stacked[slot, 0]
            y[rows, : b.shape[0]] += (x[rows] @ lora_a_stacked[slot, 0].T) @ b.T


def _rows_by_slot(slots: torch.Tensor) -> dict[int, Rows]:
    """The rows of every slot that is in use; a slice, which copies nothing, where they are neighbours."""
    found: dict[int, Rows] = {}
    for slot in slots.unique().tolist():
        if slot >= 0:
            rows = (slots == slot).nonzero()[:, 0]
            first, last = int(rows[0]), int(rows[-1])
            found[slot] = slice(first, last + 1) if last - first + 1 == len(rows) else rows
    return found
