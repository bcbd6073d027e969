"""GLM-4.5 and GLM-4.6 as torchtitan builds them: Qwen3's layers, whose heads are rotated in part."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torchtitan.models.common import QKVLinear
from torchtitan.models.common.config_utils import make_gqa_config
from torchtitan.models.qwen3 import parallelize_qwen3
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from ownloop_families.decoders import Glm4MoeShape
from ownloop_families.experts import SIGMOID_NAMES, RoutedBlock, sigmoid_network
from ownloop_families.rotary import PartialRoPE
from rl.types import Head
from trainer.engines.titan.model.specs import NO_INIT, Qwen3Policy, model_spec, norm_config, norms


class Glm4MoePolicy(Qwen3Policy):
    """A GLM-4.5 that scores."""

    hf_layer_names: ClassVar[Mapping[str, str]] = SIGMOID_NAMES

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Policy.Config):
        """Same fields as `Qwen3Policy.Config`."""


def build_spec(shape: Glm4MoeShape, head: Head, inner_attention: Module.Config) -> ModelSpec:
    """The torchtitan spec of a model that ends in `head`; `inner_attention` configures its attention kernel."""
    layers = [_layer(shape, inner_attention, index) for index in range(shape.num_layers)]
    return model_spec(shape, head, Glm4MoePolicy, layers, parallelize_qwen3)


def _layer(shape: Glm4MoeShape, inner_attention: Module.Config, index: int) -> RoutedBlock.Config:
    attention = make_gqa_config(
        dim=shape.dim,
        n_heads=shape.num_heads,
        n_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        wqkv_param_init=NO_INIT,
        wo_param_init=NO_INIT,
        inner_attention=inner_attention,
        rope=PartialRoPE.Config(dim=shape.rotary_dim, max_seq_len=shape.max_seq_len, theta=shape.rope_theta),
        qk_norm=norm_config(shape, shape.head_dim) if shape.qk_norm else None,
    )
    assert isinstance(attention.qkv_linear, QKVLinear.Config)
    attention.qkv_linear.wq.bias = attention.qkv_linear.wkv.bias = shape.attention_bias
    return RoutedBlock.Config(**norms(shape), attention=attention, **sigmoid_network(shape, index), layer=index)
