"""DeepSeek-V3 and Kimi K2: latent attention (MLA), whose values are narrower than its keys, and sigmoid routing.

Sizes are those of https://arxiv.org/abs/2412.19437, section 2.1.1.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ownloop_families.shapes import ROUTED_OPTIONS, RoutedShape, Yarn, check_experts, read_routed, read_yarn, yarn_scale
from ownloop_plan.sized_decoder import TensorSize
from rl.system.decoders import read_sizes, refuse_options, rope_parameters
from rl.system.hf_config import ModelFamily
from trainer.config import TrainerConfig

FAMILY = ModelFamily(
    architectures=("DeepseekV3ForCausalLM",),
    engines=("fsdp2", "torchtitan"),
    check="ownloop_families.deepseek_v3:check",
    decoder="ownloop_families.deepseek_v3:decoder",
    patch_cpu="ownloop_families.routes:patch_routes",
    generator_ranks=1,
    tiny="ownloop_families.deepseek_v3:tiny",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekShape(RoutedShape):
    """Latent attention and experts."""

    spec: ClassVar[str] = "ownloop_families.titan.deepseek_v3:build_spec"

    q_rank: int
    """0 where queries come from a single projection."""
    kv_rank: int
    nope_dim: int
    """Dimensions of a key that rotary embeddings leave alone."""
    rope_dim: int
    value_dim: int
    yarn: Yarn | None
    scale: float
    """What the products of queries and keys are multiplied by."""

    @property
    def latent(self) -> int:
        """As `SizedDecoder.latent`."""
        return self.kv_rank + self.rope_dim

    @property
    def values(self) -> int:
        """As `SizedDecoder.values`."""
        return self.num_heads * self.value_dim

    @property
    def absorbed(self) -> TensorSize:
        """As `SizedDecoder.absorbed`: the projection from latents to keys and values."""
        return TensorSize((self.num_heads * (self.nope_dim + self.value_dim), self.kv_rank), "matrix")

    def attention(self, kind: int) -> Iterator[TensorSize]:
        """As `SizedDecoder.attention`."""
        del kind
        yield TensorSize((self.dim,), "vector", 2)
        if self.q_rank:
            yield TensorSize((self.q_rank, self.dim), "whole")
            yield TensorSize((self.q_rank,), "vector")
        yield TensorSize((self.queries, self.q_rank or self.dim), "matrix")
        yield TensorSize((self.latent, self.dim), "whole")
        yield TensorSize((self.kv_rank,), "vector")
        yield self.absorbed
        yield TensorSize((self.dim, self.values), "matrix")

    def kept(self, kind: int) -> int:
        """As `SizedDecoder.kept`."""
        del kind
        expanded = self.num_heads * (self.nope_dim + self.value_dim)
        return 3 * (self.q_rank + self.latent) + 2 * self.queries + expanded + self.values + 4 * self.network_dim


def check(config: TrainerConfig, settings: Mapping[str, object]) -> None:
    """The row's `check`: transformers has one kind of router, and vLLM takes another where none is named."""
    for key, needed in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if settings.get(key) != needed:
            raise ValueError(
                f"config.json: {key} is {settings.get(key)!r}; it must be {needed!r}, or trainer and generator would "
                "choose experts in different ways"
            )
    check_experts(config, settings, decoder)


def decoder(config: Mapping[str, Any]) -> DeepseekShape:
    """The shape."""
    refuse_options(config, {**ROUTED_OPTIONS, "attention_bias": False, "rope_interleave": True})
    sizes, rope = read_sizes(config), rope_parameters(config)
    yarn = read_yarn(rope, sizes["max_seq_len"])
    nope_dim, rope_dim = (int(config[name]) for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
    sharper = yarn_scale(yarn.factor, float(rope.get("mscale_all_dim") or 0)) if yarn else 1.0
    return DeepseekShape(
        family="deepseek_v3",
        **{**sizes, "head_dim": nope_dim + rope_dim},
        **read_routed(config),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        q_rank=int(config.get("q_lora_rank") or 0),
        kv_rank=int(config["kv_lora_rank"]),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=int(config["v_head_dim"]),
        yarn=yarn,
        scale=sharper**2 * (nope_dim + rope_dim) ** -0.5,
    )


def tiny(path: Path) -> Path:
    """Writes a tiny random model."""
    from ownloop_families.tiny import ROUTED, SHAPE, save_random

    heads = {"kv_lora_rank": 512, "q_lora_rank": 48, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
    options: dict[str, Any] = {**SHAPE, **ROUTED, **heads, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4}
    options |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # which vLLM reads
    del options["head_dim"]
    return save_random(path, "DeepseekV3ForCausalLM", **options)
