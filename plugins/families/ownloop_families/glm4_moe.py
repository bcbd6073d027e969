"""GLM-4.5 and GLM-4.6: Qwen3's layers with sigmoid routing, whose heads are rotated in part."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ownloop_families.shapes import (
    ROUTED_OPTIONS,
    RoutedShape,
    check_experts,
    read_plain_rope,
    read_rotary_dim,
    read_routed,
)
from ownloop_plan.sized_decoder import TensorSize
from rl.system.decoders import read_sizes, refuse_options
from rl.system.hf_config import ModelFamily
from rl.types import Head
from trainer.config import TrainerConfig

FAMILY = ModelFamily(
    architectures=("Glm4MoeForCausalLM",),
    engines=("fsdp2", "torchtitan"),
    check="ownloop_families.glm4_moe:check",
    decoder="ownloop_families.glm4_moe:decoder",
    patch_cpu="ownloop_families.routes:patch_routes",
    tiny="ownloop_families.glm4_moe:tiny",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4MoeShape(RoutedShape):
    """Grouped-query attention and experts."""

    spec: ClassVar[str] = "ownloop_families.glm4_moe:build_spec"

    rotary_dim: int
    """Dimensions of a head that rotary embeddings rotate, the first ones."""
    qk_norm: bool
    attention_bias: bool

    def attention(self, kind: int) -> Iterator[TensorSize]:
        """As `SizedDecoder.attention`."""
        del kind
        yield TensorSize((self.dim,), "vector", 2)
        yield from self.projections(self.queries)
        if self.qk_norm:
            yield TensorSize((self.head_dim,), "vector", 2)
        if self.attention_bias:
            yield from self.biases()


def check(config: TrainerConfig, settings: Mapping[str, object]) -> None:
    """The row's `check`: experts in the layout."""
    check_experts(config, settings, decoder)


def decoder(config: Mapping[str, object]) -> Glm4MoeShape:
    """The shape."""
    refuse_options(config, ROUTED_OPTIONS)
    sizes = read_sizes(config)
    return Glm4MoeShape(
        family="glm4_moe",
        **sizes,
        **read_routed(config),
        rope_theta=read_plain_rope(config),
        rotary_dim=read_rotary_dim(config, sizes["head_dim"], 0.5),
        qk_norm=bool(config.get("use_qk_norm", False)),
        attention_bias=bool(config.get("attention_bias", False)),
    )


def build_spec(shape: Glm4MoeShape, head: Head, inner_attention: Any) -> Any:
    """The torchtitan spec of a model that ends in `head`; `inner_attention` configures its attention kernel."""
    from ownloop_families.titan.experts import SIGMOID_NAMES, RoutedBlock, sigmoid_network
    from ownloop_families.titan.rotary import PartialRoPE
    from trainer.engines.titan.model.specs import DensePolicy, gqa_config, model_spec, norms, parallelize_qwen3

    rope = PartialRoPE.Config(dim=shape.rotary_dim, max_seq_len=shape.max_seq_len, theta=shape.rope_theta)
    layers = [
        RoutedBlock.Config(
            **norms(shape),
            attention=gqa_config(
                shape, inner_attention, rope=rope, qk_norm=shape.qk_norm, qkv_bias=shape.attention_bias
            ),
            **sigmoid_network(shape, index),
            layer=index,
        )
        for index in range(shape.num_layers)
    ]
    return model_spec(shape, head, DensePolicy, layers, parallelize_qwen3, names=SIGMOID_NAMES)


def tiny(path: Path) -> Path:
    """Writes a tiny random model."""
    from ownloop_families.tiny import ROUTED, SHAPE, save_random

    return save_random(path, "Glm4MoeForCausalLM", **SHAPE, **ROUTED, use_qk_norm=True, attention_bias=True)
