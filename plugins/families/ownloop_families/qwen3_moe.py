"""Qwen3-MoE: Qwen3 with experts in every layer."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from ownloop_families.shapes import MixtureShape, check_experts, read_experts
from rl.system.decoders import DENSE, DenseFamily, parse_dense, read_sizes, refuse_options
from rl.system.hf_config import ModelFamily
from trainer.config import TrainerConfig

FAMILY = ModelFamily(
    architectures=("Qwen3MoeForCausalLM",),
    engines=("torchtitan", "megatron", "fsdp2"),
    agreed={"partial_rotary_factor": 1.0, "attention_bias": False, "hidden_act": "silu"},
    check="ownloop_families.qwen3_moe:check",
    decoder="ownloop_families.qwen3_moe:decoder",
    patch_cpu="ownloop_families.routes:patch_routes",
    tiny="ownloop_families.qwen3_moe:tiny",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeShape(MixtureShape):
    """Qwen3's attention and experts."""

    spec: ClassVar[str] = "ownloop_families.titan.experts:build_spec"
    proven: ClassVar[Mapping[str, object]] = {}
    identifies: ClassVar[bool] = True

    @property
    def row(self) -> DenseFamily:
        """As `DecoderConfig.row`: Qwen3's."""
        return next(row for row in DENSE if row.name == "qwen3")


def check(config: TrainerConfig, settings: Mapping[str, object]) -> None:
    """The row's `check`: experts in the layout."""
    check_experts(config, settings, decoder)


def decoder(config: Mapping[str, Any]) -> Qwen3MoeShape:
    """The shape. Accepts both spellings, `num_local_experts` of transformers 5 and the older `num_experts`."""
    refuse_options(config, {"mlp_only_layers": [], "decoder_sparse_step": 1})
    dense = parse_dense({**config, "architectures": ["Qwen3ForCausalLM"]})
    moe = read_experts(
        config,
        num_experts=int(config.get("num_local_experts", config.get("num_experts", 128))),
        hidden_dim=int(config.get("moe_intermediate_size", 768)),
        normalize_scores=bool(config.get("norm_topk_prob", False)),
    )
    shape: dict[str, Any] = {each.name: getattr(dense, each.name) for each in fields(dense)}
    shape |= {**read_sizes(config), "family": "qwen3_moe", "moe": moe}
    return Qwen3MoeShape(**shape)


def tiny(path: Path) -> Path:
    """Writes a tiny random model."""
    from rl.tiny_models import SERVABLE, tiny_qwen3_moe

    return tiny_qwen3_moe(path, **SERVABLE, moe_intermediate_size=64)
