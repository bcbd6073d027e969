"""DeepSeek-V3 and Kimi K2 as torchtitan builds them: latent attention (MLA) over experts with sigmoid routing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.models.common import Linear, RMSNorm
from torchtitan.models.common.rope import ComplexRoPE
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, parallelize_deepseekv3
from torchtitan.models.deepseek_v3.model import Attention, DeepSeekV3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from ownloop_families.deepseek_v3 import DeepseekShape
from ownloop_families.titan.experts import SIGMOID_NAMES, Replays, sigmoid_network
from ownloop_families.titan.rotary import frequencies, rope_options
from rl.types import Head
from trainer.engines.titan.model.specs import HF_LAYER_NAMES, NO_INIT, Policy, model_spec, norms, shard_head_only

_LATENT_EPS = 1e-6
"""Of the norms of latent vectors, for which transformers reads no setting."""


class InterleavedRoPE(ComplexRoPE):
    """Rotary embeddings of neighbouring dimensions, scaled by YaRN as in transformers."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        """Made of `rope_options`."""

    def _precompute_cache(self) -> Tensor:
        """[max_seq_len, dim / 2] complex"""
        config = self.config
        empty = torch.empty(config.max_seq_len, config.dim // 2, dtype=torch.complex64)
        if empty.is_meta:  # the values follow when the model is on its device
            return empty
        inv_freq, factor = frequencies(config)
        angles = torch.outer(torch.arange(config.max_seq_len).float(), inv_freq)
        return torch.polar(torch.full_like(angles, factor), angles)


class LatentAttention(Attention):
    """torchtitan's attention of DeepSeek-V3 at a scale that config.json gives."""

    @dataclass(kw_only=True, slots=True)
    class Config(Attention.Config):
        """`scale` is what the products of queries and keys are multiplied by."""

        scale: float

    def __init__(self, config: Config) -> None:
        """Builds it."""
        super().__init__(config)
        self.softmax_scale = config.scale


class DeepseekBlock(Replays, DeepSeekV3TransformerBlock):
    """A layer."""

    @dataclass(kw_only=True, slots=True)
    class Config(DeepSeekV3TransformerBlock.Config):
        """`layer` as in `Replays`."""

        layer: int = 0

    def __init__(self, config: Config) -> None:
        """Builds the layer."""
        super().__init__(config)
        self.layer = config.layer


class DeepseekPolicy(Policy, DeepSeekV3Model):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A DeepSeek-V3 that scores."""

    hf_layer_names: Mapping[str, str] = {
        **HF_LAYER_NAMES,
        **SIGMOID_NAMES,
        "attention.wq": "self_attn.q_proj",
        "attention.wq_a": "self_attn.q_a_proj",
        "attention.q_norm": "self_attn.q_a_layernorm",
        "attention.wq_b": "self_attn.q_b_proj",
        "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_norm": "self_attn.kv_a_layernorm",
        "attention.wkv_b": "self_attn.kv_b_proj",
    }

    @dataclass(kw_only=True, slots=True)
    class Config(DeepSeekV3Model.Config):
        """Same fields as `DeepSeekV3Model.Config`."""

        def update_from_config(self, *, config: object, **kwargs: object) -> None:
            """Sets how every parameter and activation is sharded."""
            DeepSeekV3Model.Config.update_from_config(self, config=config, **kwargs)
            shard_head_only(self.lm_head)


def build_spec(shape: DeepseekShape, head: Head, inner_attention: Module.Config) -> ModelSpec:
    """The torchtitan spec of a model that ends in `head`; `inner_attention` configures its attention kernel."""
    layers = [
        DeepseekBlock.Config(
            **norms(shape), attention=_attention(shape, inner_attention), **sigmoid_network(shape, index), layer=index
        )
        for index in range(shape.num_layers)
    ]
    return model_spec(shape, head, DeepseekPolicy, layers, parallelize_deepseekv3)


def _attention(shape: DeepseekShape, inner_attention: Module.Config) -> LatentAttention.Config:
    queries = shape.num_heads * shape.head_dim
    wq: dict[str, Any] = (
        {"wq_a": _linear(shape.dim, shape.q_rank), "wq_b": _linear(shape.q_rank, queries)}
        if shape.q_rank
        else {"wq": _linear(shape.dim, queries)}
    )
    return LatentAttention.Config(
        dim=shape.dim,
        n_heads=shape.num_heads,
        q_lora_rank=shape.q_rank,
        kv_lora_rank=shape.kv_rank,
        qk_nope_head_dim=shape.nope_dim,
        qk_rope_head_dim=shape.rope_dim,
        v_head_dim=shape.value_dim,
        **wq,
        q_norm=_latent_norm(shape.q_rank),
        wkv_a=_linear(shape.dim, shape.kv_rank + shape.rope_dim),
        kv_norm=_latent_norm(shape.kv_rank),
        wkv_b=_linear(shape.kv_rank, shape.num_heads * (shape.nope_dim + shape.value_dim)),
        wo=_linear(shape.num_heads * shape.value_dim, shape.dim),
        inner_attention=inner_attention,
        rope=InterleavedRoPE.Config(**rope_options(shape, shape.rope_dim, shape.yarn)),
        scale=shape.scale,
    )


def _linear(in_features: int, out_features: int) -> Linear.Config:
    return Linear.Config(in_features=in_features, out_features=out_features, param_init=NO_INIT)


def _latent_norm(size: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=_LATENT_EPS, param_init=NO_INIT)
