"""Qwen3.5 in packed rows: its linear layers, of transformers, keep documents apart in plain PyTorch.

transformers' own functions ignore where documents begin, without an error, and an installed `fla` would replace them.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from trainer.families.gated_delta import causal_convolution, gated_delta_rule


def by_documents(model: Any) -> None:
    """The `prepare` of the family: changes the linear layers of a model of transformers in place."""
    for layer in model.base_model.layers:
        if (module := getattr(layer, "linear_attn", None)) is not None:
            module.__class__ = type("GatedDeltaNetByDocuments", (_ByDocuments, type(module)), {})


class _ByDocuments(nn.Module):
    """The forward pass of `Qwen3_5GatedDeltaNet` for one packed row, with its parameters."""

    def forward(self, hidden_states: Tensor, document_bounds: Any, **options: Any) -> Tensor:
        """[1, L, D] -> [1, L, D]; `document_bounds` are the row's `Bounds`."""
        del options
        own: Any = self
        x, sizes = hidden_states[0], document_bounds.sizes
        positions = torch.cat([torch.arange(size, device=x.device) for size in sizes])
        mixed = causal_convolution(own.in_proj_qkv(x), own.conv1d.weight[:, 0], positions)
        q, k, v = mixed.split([own.key_dim, own.key_dim, own.value_dim], -1)
        groups = own.num_v_heads // own.num_k_heads
        q, k = (each.unflatten(-1, (-1, own.head_k_dim)).repeat_interleave(groups, 1) for each in (q, k))
        g = -own.A_log.float().exp() * F.softplus(own.in_proj_a(x).float() + own.dt_bias)
        out = gated_delta_rule(
            q, k, v.unflatten(-1, (-1, own.head_v_dim)), g, own.in_proj_b(x).sigmoid(), sizes
        )  # [L, heads, head_v_dim]
        gate = own.in_proj_z(x).reshape(-1, own.head_v_dim)
        out = own.norm(out.reshape(-1, own.head_v_dim), gate)
        return own.out_proj(out.reshape(1, len(x), -1))
