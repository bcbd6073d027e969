"""The shapes by which torchtitan builds further families, parsed from `config.json`. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from rl.system.hf_config import rope_parameters
from trainer.config import TrainerConfig
from trainer.engines.decoder_config import DecoderConfig, parse_decoder_config, read_experts, read_sizes, refuse_options


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """Frequency scaling for long contexts, YaRN (https://arxiv.org/abs/2309.00071)."""

    factor: float
    attention_factor: float
    """What cosines and sines are multiplied by."""
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int
    truncate: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeShape(DecoderConfig):
    """Qwen3-MoE: experts in every layer."""

    spec: ClassVar[str] = "ownloop_families.experts:build_spec"


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssShape(DecoderConfig):
    """gpt-oss: sinks and windows in attention, biases everywhere, experts in every layer."""

    spec: ClassVar[str] = "ownloop_families.gpt_oss:build_spec"

    windows: tuple[int | None, ...]
    """For each layer, how many tokens a query attends to, itself among them; None for all before it."""
    yarn: Yarn | None
    swiglu_alpha: float
    swiglu_limit: float

    def check_layout(self, config: TrainerConfig) -> None:
        """Raises ValueError for an option that is not proven for gpt-oss."""
        refuse_unproven(config, "gpt-oss", context_parallel=1, compile=False, float8="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidRouting:
    """How layers of DeepSeek-V3 and GLM-4.5 choose experts, which the first layers lack."""

    first_layer: int
    """The first layer with experts; those before it have a feed-forward network."""
    num_shared_experts: int
    num_groups: int
    num_chosen_groups: int
    scale: float
    """What the weights of a token's experts are multiplied by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedShape(DecoderConfig):
    """A decoder with sigmoid routing, a selection bias and shared experts."""

    routing: SigmoidRouting

    def check_layout(self, config: TrainerConfig) -> None:
        """Raises ValueError for an option that is not proven, or if ranks cannot cut a feed-forward network."""
        refuse_unproven(config, self.family, compile=False, float8="none")
        assert self.moe is not None
        sizes = {
            "intermediate_size": self.hidden_dim,
            "moe_intermediate_size x n_shared_experts": self.moe.hidden_dim * self.routing.num_shared_experts,
        }
        refuse_uneven(config, sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4MoeShape(RoutedShape):
    """GLM-4.5: grouped-query attention whose heads are rotated in part."""

    spec: ClassVar[str] = "ownloop_families.glm4_moe:build_spec"

    rotary_dim: int
    """Dimensions of a head that rotary embeddings rotate, the first ones."""
    qk_norm: bool
    attention_bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekShape(RoutedShape):
    """DeepSeek-V3: latent attention (MLA), whose values are narrower than its keys."""

    spec: ClassVar[str] = "ownloop_families.deepseek_v3:build_spec"

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Shape(DecoderConfig):
    """Qwen3.5 (text): linear layers with a gated delta rule, every few layers attention with gated outputs."""

    spec: ClassVar[str] = "ownloop_families.qwen3_5:build_spec"

    attends: tuple[bool, ...]
    """For each layer, whether it has attention and not a delta rule."""
    rotary_dim: int
    """Dimensions of a head that rotary embeddings rotate, the first ones."""
    num_key_heads: int
    """Of a linear layer, as the sizes that follow."""
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int
    """Tokens that a convolution sees."""
    shared_hidden_dim: int
    """Hidden dimension of the shared expert; 0 without experts."""
    state_dtype: str
    """Of what a generator keeps of a delta rule; empty for its own dtype."""

    @property
    def values(self) -> int:
        """Dimensions of the values of all heads of a linear layer."""
        return self.num_value_heads * self.value_head_dim

    @property
    def channels(self) -> int:
        """Dimensions of its queries, keys and values, over which the convolution goes."""
        return self.values + 2 * self.num_key_heads * self.key_head_dim

    def check_layout(self, config: TrainerConfig) -> None:
        """Raises ValueError for an option that is not proven for Qwen3.5, or if ranks cannot share heads evenly."""
        refuse_unproven(config, "Qwen3.5", context_parallel=1, compile=False, float8="none")
        heads = {"linear_num_key_heads": self.num_key_heads, "linear_num_value_heads": self.num_value_heads}
        refuse_uneven(config, {**heads, "shared_expert_intermediate_size": self.shared_hidden_dim})


def refuse_unproven(config: TrainerConfig, family: str, **accepted: Any) -> None:
    """Raises ValueError if an option has another value than the one that is proven."""
    for name, value in accepted.items():
        if (found := getattr(config, name)) != value:
            raise ValueError(
                f"TrainerConfig.{name} is {found!r}; for {family} only {value!r} is proven with engine 'torchtitan'"
            )


def refuse_uneven(config: TrainerConfig, sizes: Mapping[str, int]) -> None:
    """Raises ValueError if tensor-parallel ranks cannot have equal parts of a size, which `config.json` names so."""
    for name, size in sizes.items():
        if size % config.tensor_parallel:
            raise ValueError(
                f"TrainerConfig.tensor_parallel is {config.tensor_parallel}, which does not divide the model's "
                f"{name} {size}; it must divide that"
            )


def qwen3_moe(config: Mapping[str, Any]) -> Qwen3MoeShape:
    """The `decoder` of Qwen3-MoE."""
    shape = parse_decoder_config(config)
    return Qwen3MoeShape(**{field.name: getattr(shape, field.name) for field in fields(shape)})


_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Where a file states nothing."""


def gpt_oss(config: Mapping[str, Any]) -> GptOssShape:
    """The `decoder` of gpt-oss."""
    accepted = {"attention_bias": True, "hidden_act": "silu", "attention_dropout": 0.0}
    refuse_options(config, accepted)
    sizes = read_sizes(config)
    kinds = config.get("layer_types") or _alternating(sizes["num_layers"])
    window = config.get("sliding_window")
    rope = rope_parameters(config) or _GPT_OSS_ROPE
    if "rope_type" not in rope:  # transformers scales or not, depending on where the base stands
        raise ValueError(f"config.json: rope_parameters is {rope} without rope_type; state it, 'yarn' or 'default'")
    return GptOssShape(
        family="gpt_oss",
        **sizes,
        rope_theta=float(rope.get("rope_theta", 150000.0)),
        rope_scaling=None,
        moe=read_experts(
            config,
            num_experts=int(config.get("num_local_experts", 128)),
            hidden_dim=sizes["hidden_dim"],
            normalize_scores=True,
        ),
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        yarn=read_yarn(rope, sizes["max_seq_len"]),
        swiglu_alpha=float(config.get("swiglu_alpha", 1.702)),
        swiglu_limit=float(config.get("swiglu_limit", 7.0)),
    )


_ROUTED_OPTIONS: Mapping[str, Any] = {"hidden_act": "silu", "attention_dropout": 0.0, "tie_word_embeddings": False}


def glm4_moe(config: Mapping[str, Any]) -> Glm4MoeShape:
    """The `decoder` of GLM-4.5 and GLM-4.6."""
    refuse_options(config, _ROUTED_OPTIONS)
    sizes, rope = read_sizes(config), rope_parameters(config)
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"config.json: rope_type is {rope['rope_type']!r}; only 'default' is supported")
    return Glm4MoeShape(
        family="glm4_moe",
        **sizes,
        **_routed(config),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        rotary_dim=_rotary_dim(config, sizes["head_dim"], 0.5),
        qk_norm=bool(config.get("use_qk_norm", False)),
        attention_bias=bool(config.get("attention_bias", False)),
    )


def deepseek_v3(config: Mapping[str, Any]) -> DeepseekShape:
    """The `decoder` of DeepSeek-V3 and Kimi K2."""
    refuse_options(config, {**_ROUTED_OPTIONS, "attention_bias": False, "rope_interleave": True})
    sizes, rope = read_sizes(config), rope_parameters(config)
    yarn = read_yarn(rope, sizes["max_seq_len"])
    nope_dim, rope_dim = (int(config[name]) for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
    sharper = yarn_scale(yarn.factor, float(rope.get("mscale_all_dim") or 0)) if yarn else 1.0
    return DeepseekShape(
        family="deepseek_v3",
        **{**sizes, "head_dim": nope_dim + rope_dim},
        **_routed(config),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        q_rank=int(config.get("q_lora_rank") or 0),
        kv_rank=int(config["kv_lora_rank"]),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=int(config["v_head_dim"]),
        yarn=yarn,
        scale=sharper**2 * (nope_dim + rope_dim) ** -0.5,
    )


def qwen3_5(config: Mapping[str, Any]) -> Qwen35Shape:
    """The `decoder` of Qwen3.5, dense or with experts in every layer."""
    refuse_options(
        config,
        {"hidden_act": "silu", "attention_dropout": 0.0, "attention_bias": False, "mlp_only_layers": []},
    )
    rope = rope_parameters(config)
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"config.json: rope_type is {rope['rope_type']!r}; only 'default' is supported")
    has_experts = "num_experts" in config
    # Mixtures have no feed-forward network of their own, so their files need not say how large it would be.
    sizes = read_sizes({"head_dim": 256, **({"intermediate_size": 0} if has_experts else {}), **config})
    interval = int(config.get("full_attention_interval") or 4)
    kinds = config.get("layer_types") or [
        "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(sizes["num_layers"])
    ]
    return Qwen35Shape(
        family="qwen3_5",
        **sizes,
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        rope_scaling=None,
        moe=read_experts(
            config,
            num_experts=int(config["num_experts"]),
            hidden_dim=int(config["moe_intermediate_size"]),
            normalize_scores=True,
        )
        if has_experts
        else None,
        attends=tuple(kind == "full_attention" for kind in kinds),
        rotary_dim=_rotary_dim(config, sizes["head_dim"], 0.25),
        num_key_heads=int(config.get("linear_num_key_heads", 16)),
        num_value_heads=int(config.get("linear_num_value_heads", 32)),
        key_head_dim=int(config.get("linear_key_head_dim", 128)),
        value_head_dim=int(config.get("linear_value_head_dim", 128)),
        kernel_size=int(config.get("linear_conv_kernel_dim", 4)),
        shared_hidden_dim=int(config["shared_expert_intermediate_size"]) if has_experts else 0,
        state_dtype=str(config.get("mamba_ssm_dtype") or ""),
    )


def _rotary_dim(config: Mapping[str, Any], head_dim: int, default: float) -> int:
    """Dimensions of a head that rotary embeddings rotate. Raises ValueError where those are none or too many."""
    part = rope_parameters(config).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    part = default if part is None else part
    if not 0 < part <= 1:
        raise ValueError(f"config.json: partial_rotary_factor is {part!r}; it must be above 0 and at most 1")
    return int(head_dim * part)


def _routed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that both have. Raises ValueError for groups that cannot be chosen from."""
    groups, chosen = (1 if config.get(name) is None else config[name] for name in ("n_group", "topk_group"))
    if not 1 <= chosen <= groups:
        raise ValueError(f"config.json: topk_group is {chosen!r}; it must be between 1 and n_group, {groups!r}")
    return {
        "rope_scaling": None,
        "moe": read_experts(
            config,
            num_experts=int(config["n_routed_experts"]),
            hidden_dim=int(config["moe_intermediate_size"]),
            normalize_scores=bool(config.get("norm_topk_prob", True)),
        ),
        "routing": SigmoidRouting(
            first_layer=int(config.get("first_k_dense_replace") or 0),
            num_shared_experts=int(config.get("n_shared_experts") or 0),
            num_groups=int(groups),
            num_chosen_groups=int(chosen),
            scale=float(config.get("routed_scaling_factor", 1.0)),
        ),
    }


def _alternating(num_layers: int) -> list[str]:
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]


def read_yarn(rope: Mapping[str, Any], max_seq_len: int) -> Yarn | None:
    """YaRN's settings, or None without scaling. Raises ValueError for another kind of scaling."""
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    if kind != "yarn":
        raise ValueError(f"config.json: rope_type is {kind!r}; supported are 'default' and 'yarn'")
    factor = float(rope["factor"])
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    scale = yarn_scale(factor, mscale) / yarn_scale(factor, all_dim) if mscale and all_dim else yarn_scale(factor, 1.0)
    stated = rope.get("attention_factor")
    return Yarn(
        factor=factor,
        attention_factor=float(scale if stated is None else stated),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        original_max_position_embeddings=int(rope.get("original_max_position_embeddings") or max_seq_len),
        truncate=bool(rope.get("truncate", True)),
    )


def yarn_scale(factor: float, mscale: float) -> float:
    """By how much YaRN sharpens attention for contexts that are `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
