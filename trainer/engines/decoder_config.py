"""The shape of a decoder, parsed from the contents of its `config.json`: of Llama, Qwen2 or Qwen3, or of a family's.

Imports neither torch nor an engine, so the controller can refuse a model before any process starts. Both spellings of
rotary embeddings are read: `rope_parameters` of transformers 5, and the older `rope_theta` with `rope_scaling`. Absent
keys get the defaults of transformers' own configuration classes.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rl.system.hf_config import read_config, rope_parameters
from trainer.config import TrainerConfig

FAMILIES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",  # the same layers, where no sliding window is set
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
CLASSIFIER_SUFFIX = "ForSequenceClassification"
"""How transformers names a backbone with a head called `score`, the form in which critics are exported."""
_LM_SUFFIX = "ForCausalLM"
_ANY = "the engine 'fsdp2' trains others"
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_ACCEPTED: Mapping[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1 for long contexts (https://arxiv.org/abs/2407.21783, section 3.4.2)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The experts that replace the feed-forward network in every layer."""

    num_experts: int
    experts_per_token: int
    hidden_dim: int
    """Hidden dimension of one expert."""
    normalize_scores: bool
    """Whether the scores of a token's experts are scaled to add up to one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder of the Llama, Qwen2 or Qwen3 family. In Qwen2, queries, keys and values have biases.

    Families of plug-ins have subclasses, which say what torchtitan builds, and what is not proven of it.
    """

    spec: ClassVar[str] = "trainer.engines.titan.model.specs:build_spec"
    """The function that makes torchtitan's spec of such a shape, as an importable name."""

    family: str
    vocab_size: int
    dim: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tie_embeddings: bool
    max_seq_len: int
    """Longest sequence that the model accepts, in tokens (`max_position_embeddings`)."""
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    moe: ExpertsConfig | None

    def check_layout(self, config: TrainerConfig) -> None:
        """Raises ValueError for an option of torchtitan that is not proven for the family."""


def read_decoder_config(model: Path) -> DecoderConfig:
    """Parses `config.json` of a model directory. Raises ValueError if it is missing, unreadable or unsupported."""
    return parse_decoder_config(read_config(model))


def parse_decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Parses the contents of a `config.json`. Raises ValueError naming the key, its value and what is supported."""
    family = _family(config)
    sizes = read_sizes(config)
    refuse_options(config, _ACCEPTED)
    if family == "qwen3" and not config.get("head_dim"):
        sizes["head_dim"] = 128
    if config.get("model_type") == "mistral" and config.get("sliding_window") is not None:
        raise ValueError(
            f"config.json: sliding_window is {config['sliding_window']!r}; only null is supported for Mistral (since "
            "v0.2 its models have none). The engine 'fsdp2' trains such a model too"
        )
    rope_theta, rope_scaling = _read_rope(config)
    moe = _read_moe(config) if family == "qwen3_moe" else None
    return DecoderConfig(family=family, **sizes, rope_theta=rope_theta, rope_scaling=rope_scaling, moe=moe)


def read_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `DecoderConfig` that all decoders state by the same keys. Raises ValueError for a missing one."""
    for key in _REQUIRED:
        if key not in config:
            raise ValueError(f"config.json lacks {key!r}")
    num_heads, dim = int(config["num_attention_heads"]), int(config["hidden_size"])
    return {
        "vocab_size": int(config["vocab_size"]),
        "dim": dim,
        "hidden_dim": int(config["intermediate_size"]),
        "num_layers": int(config["num_hidden_layers"]),
        "num_heads": num_heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or num_heads),
        "head_dim": int(config.get("head_dim") or dim // num_heads),
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "max_seq_len": int(config.get("max_position_embeddings", 2048)),
    }


def _family(config: Mapping[str, Any]) -> str:
    """The family of the first supported architecture. A classifier counts as the language model of its backbone."""
    architectures: list[str] = config.get("architectures") or []
    for name in architectures:
        backbone = name.removesuffix(CLASSIFIER_SUFFIX) + _LM_SUFFIX if name.endswith(CLASSIFIER_SUFFIX) else name
        if backbone in FAMILIES:
            return FAMILIES[backbone]
    raise ValueError(f"config.json: architectures is {architectures}; this engine's are {', '.join(FAMILIES)}; {_ANY}")


def _read_moe(config: Mapping[str, Any]) -> ExpertsConfig:
    """Accepts both spellings, `num_local_experts` of transformers 5 and the older `num_experts`."""
    return read_experts(
        config,
        num_experts=int(config.get("num_local_experts", config.get("num_experts", 128))),
        hidden_dim=int(config.get("moe_intermediate_size", 768)),
        normalize_scores=bool(config.get("norm_topk_prob", False)),
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


def refuse_options(config: Mapping[str, Any], accepted: Mapping[str, Any]) -> None:
    """Raises ValueError for a key with another value than the accepted one, where null is false; and if quantised."""
    for key, supported in accepted.items():
        value = config.get(key, supported)
        if value != supported and (value is not None or supported is True):
            raise ValueError(f"config.json: {key} is {value!r}; only {supported!r} is supported; {_ANY}")
    if config.get("quantization_config") is not None:
        raise ValueError("config.json: quantization_config is set; only unquantized weights can be trained")


def _read_rope(config: Mapping[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    rope = rope_parameters(config)
    theta = float(rope.get("rope_theta", 10000.0))
    rope_type = rope.get("rope_type", "default")
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if part != 1.0:
        raise ValueError(f"config.json: partial_rotary_factor is {part!r}; only 1.0 is supported")
    if rope_type == "default":
        return theta, None
    if rope_type == "llama3":
        fields = [field.name for field in dataclasses.fields(Llama3RopeScaling)]
        if lacking := [name for name in fields if not isinstance(rope.get(name), int | float)]:
            raise ValueError(f"config.json: rope_type is 'llama3' and {lacking[0]} is {rope.get(lacking[0])!r}")
        return theta, Llama3RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
        )
    raise ValueError(f"config.json: rope_type is {rope_type!r}; supported are 'default' and 'llama3'; {_ANY}")
