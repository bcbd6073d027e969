"""Linear layers that an adapter can be switched on in, and the low-rank product that it adds.

A layer holds no adapter: the engine of an adapter lends its A and B to the layers for the time of a call. Recomputed
activations therefore see the same adapter, because the backward pass belongs to the call.
"""

import contextlib
from collections.abc import Generator, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn


class LowRank(NamedTuple):
    """One layer's part of an adapter."""

    a: Tensor
    """[rank, in] float32"""
    b: Tensor
    """[out, rank] float32"""
    scale: float

    def down(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., rank], scaled, in the dtype of `x`."""
        return F.linear(x, self.a.to(x.dtype)) * self.scale

    def product(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out] in the dtype of `x`."""
        return F.linear(self.down(x), self.b.to(x.dtype))


class Adaptable(nn.Linear):
    """A linear layer that can be adapted. Its subclasses add the product; each engine has its own."""

    hf_module: str = ""
    """The layer's Hugging Face name, such as `model.layers.0.self_attn.q_proj`."""
    low_rank: LowRank | None = None
    """The adapter in use. A tuple, so that its parameters do not become the layer's."""


def adaptable_layers(model: nn.Module) -> dict[str, Adaptable]:
    """The layers of a model that can be adapted, by Hugging Face name."""
    return {module.hf_module: module for module in model.modules() if isinstance(module, Adaptable)}


@contextlib.contextmanager
def adapted(layers: Mapping[str, Adaptable], low_ranks: Mapping[str, LowRank]) -> Generator[None]:
    """Within the block, the layers add the products of these names; other layers add nothing."""
    for name, low_rank in low_ranks.items():
        layers[name].low_rank = low_rank
    try:
        yield
    finally:
        for name in low_ranks:
            layers[name].low_rank = None


def freeze(model: nn.Module, dtype: torch.dtype) -> None:
    """Turns parameters that are not loaded yet into frozen ones of `dtype`. Buffers stay as they are."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
