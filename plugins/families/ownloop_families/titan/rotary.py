"""Rotary embeddings of a part of each head, or scaled by YaRN (https://arxiv.org/abs/2309.00071).

YaRN's factor is on cosines and sines, as in transformers; torchtitan would put its square into the scale of attention.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.models.common import RoPE
from torchtitan.models.common.rope import _yarn_inv_freq  # pyright: ignore[reportPrivateUsage] - no public one

from ownloop_families.shapes import Yarn
from rl.system.decoders import DecoderConfig
from trainer.engines.titan.model.attention import HFRoPE


def rope_options(shape: DecoderConfig, dim: int, yarn: Yarn | None) -> dict[str, Any]:
    """The fields of torchtitan's `RoPE.Config`. `scaling_factor` is what cosines and sines are multiplied by."""
    options: dict[str, Any] = {"dim": dim, "max_seq_len": shape.max_seq_len, "theta": shape.rope_theta}
    if yarn is None:
        return options
    return {
        **options,
        "scaling": "yarn",
        "scaling_factor": yarn.attention_factor,
        "rope_factor": yarn.factor,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "original_seq_len": yarn.original_max_position_embeddings,
        "truncate": yarn.truncate,
    }


def frequencies(c: RoPE.Config) -> tuple[Tensor, float]:
    """[dim / 2] angles per position, and what cosines and sines are multiplied by."""
    if c.scaling != "yarn":
        return 1.0 / c.theta ** (torch.arange(0, c.dim, 2).float() / c.dim), 1.0
    scaling = c.rope_factor, c.beta_fast, c.beta_slow, c.original_seq_len, c.truncate
    return _yarn_inv_freq(c.dim, c.theta, *scaling), c.scaling_factor


class YarnRoPE(HFRoPE):
    """Rotary embeddings of halves."""

    @dataclass(kw_only=True, slots=True)
    class Config(HFRoPE.Config):
        """Made of `rope_options`."""

    def _precompute_cache(self) -> Tensor:
        return super()._precompute_cache() * frequencies(self.config)[1]

    def inverse_frequencies(self) -> Tensor:
        """[dim / 2] angles per position."""
        return frequencies(self.config)[0]


class PartialRoPE(HFRoPE):
    """Rotary embeddings of the first `dim` dimensions of each head."""

    @dataclass(kw_only=True, slots=True)
    class Config(HFRoPE.Config):
        """Same fields as `HFRoPE.Config`."""

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[1, L, heads, head_dim] each, rotated."""
        dim = self.config.dim
        rotated = super().forward(query[..., :dim], key[..., :dim], positions)
        query, key = (torch.cat([r, x[..., dim:]], -1) for r, x in zip(rotated, (query, key), strict=True))
        return query, key
