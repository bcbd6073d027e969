"""What shapes of several families have: experts, sigmoid routing, YaRN. Imports no torch."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ownloop_plan.sized_decoder import SizedDecoder, TensorSize
from rl.system.decoders import ExpertsConfig, rope_parameters
from rl.system.hardware import sees_gpu
from trainer.config import TrainerConfig

WITHOUT_COMPILING: Mapping[str, object] = {"compile": False, "float8": "none"}
WITHOUT_CONTEXTS: Mapping[str, object] = {"context_parallel": 1, **WITHOUT_COMPILING}


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureShape(SizedDecoder):
    """A decoder whose layers of kind 1 have experts, if it has any. Those of kind 0, if any, have none."""

    proven: ClassVar[Mapping[str, object]] = WITHOUT_COMPILING
    identifies: ClassVar[bool] = False

    @property
    def shared_dim(self) -> int:
        """Hidden dimension of the experts that every token goes to, together."""
        return 0

    @property
    def network_dim(self) -> int:
        """As `SizedDecoder.network_dim`, shared experts among them."""
        moe = self.moe
        return self.hidden_dim if moe is None else moe.experts_per_token * moe.hidden_dim + self.shared_dim

    def network(self, kind: int) -> Iterator[TensorSize]:
        """As `SizedDecoder.network`: a router, three stacks, and shared experts."""
        if self.moe is None or not kind:
            yield from self.feed_forward(self.hidden_dim)
            return
        count, hidden = self.moe.num_experts, self.moe.hidden_dim
        yield TensorSize((count, self.dim), "whole")
        yield TensorSize((count, hidden, self.dim), "expert", 2)
        yield TensorSize((count, self.dim, hidden), "expert")
        if self.shared_dim:
            yield from self.feed_forward(self.shared_dim)


def check_experts(
    config: TrainerConfig, settings: Mapping[str, object], decoder: Callable[[Mapping[str, object]], MixtureShape]
) -> None:
    """Raises ValueError if the engine torchtitan cannot train a model with experts in this layout or on this host.

    `decoder` makes the shape of `settings`, which other engines do not need.
    """
    if config.engine != "torchtitan" or (moe := decoder(settings).moe) is None:
        return
    tensor_parallel, expert_parallel = config.tensor_parallel, config.expert_parallel
    if tensor_parallel > 1 and expert_parallel == 1:
        # torchtitan 0.3.0 computes wrong gradients below a layer whose experts are cut by tensor parallelism.
        raise ValueError(
            f"TrainerConfig.tensor_parallel is {tensor_parallel} and expert_parallel is 1; tensor parallelism cannot "
            f"split experts, so expert_parallel must be more than 1, for example {tensor_parallel}"
        )
    if tensor_parallel > 1 and not config.sequence_parallel:
        # torchtitan 0.3.0 asks for the experts' output as a partial sum, which DTensor does not redistribute to.
        raise ValueError(
            f"TrainerConfig.sequence_parallel is False and tensor_parallel is {tensor_parallel}; experts take "
            "their tokens from equal parts of the sequence, so sequence_parallel must be True"
        )
    sharing = config.data_parallel_shard * config.context_parallel * tensor_parallel
    if sharing % expert_parallel:
        raise ValueError(
            f"TrainerConfig.expert_parallel is {expert_parallel}; it must divide data_parallel_shard x "
            f"context_parallel x tensor_parallel, which is {sharing}: "
            f"{[n for n in range(1, sharing + 1) if sharing % n == 0]}"
        )
    if moe.num_experts % expert_parallel:
        divisors = [n for n in range(1, moe.num_experts + 1) if moe.num_experts % n == 0]
        raise ValueError(
            f"TrainerConfig.expert_parallel is {expert_parallel}, which does not divide the model's "
            f"{moe.num_experts} experts; they allow {divisors}"
        )
    if config.compile:
        _check_compiled_experts(config)


def _check_compiled_experts(config: TrainerConfig) -> None:
    if config.compute_dtype == "float32":
        raise ValueError(
            "TrainerConfig.compile is True and compute_dtype is 'float32'; torch compiles experts in bfloat16 only, so "
            "compute_dtype must be 'bfloat16', or compile False"
        )
    if not sees_gpu():
        raise ValueError(
            "TrainerConfig.compile is True and the model has experts, which torch does not compile on a host without "
            "GPU; compile must be False, which is as fast on a CPU"
        )


def read_experts(
    config: Mapping[str, Any], *, num_experts: int, hidden_dim: int, normalize_scores: bool
) -> ExpertsConfig:
    """The experts of a layer. Raises ValueError if a token is to have more of them than there are."""
    experts_per_token = int(config.get("num_experts_per_tok", 8))
    if not 1 <= experts_per_token <= num_experts:
        raise ValueError(
            f"config.json: num_experts_per_tok is {experts_per_token}; it must be between 1 and the {num_experts} "
            "experts of a layer"
        )
    return ExpertsConfig(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        hidden_dim=hidden_dim,
        normalize_scores=normalize_scores,
    )


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
class RoutedShape(MixtureShape):
    """A decoder with sigmoid routing, a selection bias and shared experts."""

    routing: SigmoidRouting

    @property
    def cut(self) -> Mapping[str, int]:
        """As `DecoderConfig.cut`: feed-forward networks and shared experts."""
        shared = "moe_intermediate_size x n_shared_experts"
        return {"intermediate_size": self.hidden_dim, shared: self.shared_dim}

    @property
    def shared_dim(self) -> int:
        """As `MixtureShape.shared_dim`."""
        return 0 if self.moe is None else self.routing.num_shared_experts * self.moe.hidden_dim

    @property
    def kinds(self) -> tuple[int, ...]:
        """1 for layers with experts."""
        return tuple(int(layer >= self.routing.first_layer) for layer in range(self.num_layers))


ROUTED_OPTIONS: Mapping[str, Any] = {"hidden_act": "silu", "attention_dropout": 0.0, "tie_word_embeddings": False}
"""What `refuse_options` accepts of them."""


def read_routed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `RoutedShape` that concern experts. Raises ValueError for groups that cannot be chosen from."""
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


def read_rotary_dim(config: Mapping[str, object], head_dim: int, default: float) -> int:
    """Dimensions of a head that rotary embeddings rotate. Raises ValueError where those are none or too many."""
    part = rope_parameters(config).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    part = default if part is None else part
    if not 0 < part <= 1:
        raise ValueError(f"config.json: partial_rotary_factor is {part!r}; it must be above 0 and at most 1")
    return int(head_dim * part)


def read_plain_rope(config: Mapping[str, object]) -> float:
    """The base of rotary embeddings without scaling. Raises ValueError for others."""
    rope = rope_parameters(config)
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"config.json: rope_type is {rope['rope_type']!r}; only 'default' is supported")
    return float(rope.get("rope_theta", 10000.0))


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
