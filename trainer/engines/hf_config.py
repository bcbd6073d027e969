"""What the engines need to know of a Hugging Face `config.json`, and whether they can train such a model.

Pure reading of a dictionary: imports neither torch nor an engine, so the controller can refuse a model before any
process starts. Both spellings of rotary embeddings are read, `rope_parameters` of transformers 5 and the older
`rope_theta` with `rope_scaling`. Absent keys have the defaults of transformers' own configuration classes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl.types import Head

Family = Literal["llama", "qwen3", "qwen3_moe"]

_FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)
# What transformers calls a backbone with a head of its own, named `score`: what an exported critic is.
_LM, _CLASSIFIER = "ForCausalLM", "ForSequenceClassification"
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1 for long contexts (https://arxiv.org/abs/2407.21783, section 3.4.2)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HFMoEConfig:
    """The experts that take the place of the feed-forward network, in every layer."""

    num_experts: int
    experts_per_token: int
    hidden_dim: int
    """Of one expert."""
    normalize_scores: bool
    """Whether the scores of a token's experts are made to add up to one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HFModelConfig:
    """The shape of a decoder of the Llama or Qwen3 family."""

    family: Family
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
    """Longest sequence the model accepts, in tokens (`max_position_embeddings`)."""
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    moe: HFMoEConfig | None

    def check_layout(self, tensor_parallel: int, expert_parallel: int = 1, *, sequence_parallel: bool = True) -> None:
        """Raises ValueError when the model cannot be cut into that many tensor- and expert-parallel parts."""
        sizes = {name: getattr(self, name) for name in ("num_heads", "num_kv_heads", "vocab_size")}
        if self.moe is None:
            sizes["hidden_dim"] = self.hidden_dim
        for name, size in sizes.items():
            if size % tensor_parallel:
                divisors = [n for n in range(1, self.num_kv_heads + 1) if all(s % n == 0 for s in sizes.values())]
                raise ValueError(
                    f"TrainerConfig.tensor_parallel is {tensor_parallel}, which does not divide the model's {name} "
                    f"{size}; its sizes allow {divisors}"
                )
        if self.moe is not None and tensor_parallel > 1 and expert_parallel == 1:
            # torchtitan 0.3.0 computes wrong gradients below a layer whose experts are cut by tensor parallelism.
            raise ValueError(
                f"TrainerConfig.tensor_parallel is {tensor_parallel} and expert_parallel is 1; experts cannot "
                f"be cut, so expert_parallel must be more than 1, {tensor_parallel} say"
            )
        if self.moe is not None and tensor_parallel > 1 and not sequence_parallel:
            # torchtitan 0.3.0 asks for the experts' output as a partial sum, which DTensor does not redistribute to.
            raise ValueError(
                f"TrainerConfig.sequence_parallel is False and tensor_parallel is {tensor_parallel}; experts take "
                "their tokens from equal parts of the sequence, so sequence_parallel must be True"
            )
        if expert_parallel == 1:
            return
        if self.moe is None:
            raise ValueError(
                f"TrainerConfig.expert_parallel is {expert_parallel}; this model has no experts, so it must be 1"
            )
        if self.moe.num_experts % expert_parallel:
            divisors = [n for n in range(1, self.moe.num_experts + 1) if self.moe.num_experts % n == 0]
            raise ValueError(
                f"TrainerConfig.expert_parallel is {expert_parallel}, which does not divide the model's "
                f"{self.moe.num_experts} experts; they allow {divisors}"
            )

    def check_stages(self, pipeline_parallel: int, num_stages: int, head: Head = "lm") -> None:
        """Raises ValueError when the model cannot be cut into that many stages of a pipeline."""
        if pipeline_parallel > 1 and self.tie_embeddings and head == "lm":
            raise ValueError(
                f"TrainerConfig.pipeline_parallel is {pipeline_parallel}; this model's output projection is its "
                "embedding (tie_word_embeddings), which cannot be in the first and the last stage at once, so it must "
                "be 1. data_parallel_shard, tensor_parallel and context_parallel work with such a model"
            )
        if num_stages > self.num_layers:
            largest = self.num_layers * pipeline_parallel // num_stages
            raise ValueError(
                f"TrainerConfig.pipeline_parallel is {pipeline_parallel}, which makes {num_stages} stages; the model "
                f"has {self.num_layers} layers and every stage needs one, so it must be at most {largest}"
                + (", or pipeline_schedule '1F1B', which makes half as many" if num_stages > pipeline_parallel else "")
            )


def read_hf_config(model: Path) -> HFModelConfig:
    """Reads `config.json` of a model directory. Raises ValueError when it is missing, unreadable or unsupported."""
    return check_supported(read_config_json(model))


def read_config_json(model: Path) -> Mapping[str, Any]:
    """The contents of `config.json` of a model directory. Raises ValueError when it is missing or unreadable."""
    file = model / "config.json"
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        raise ValueError(f"model is {str(model)!r}; a directory with a config.json is expected") from None
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def check_head(config: Mapping[str, Any], head: Head) -> None:
    """Raises ValueError when the contents of a `config.json` are those of a model without that head's backbone."""
    architectures: list[str] = config.get("architectures") or []
    if head == "lm" and any(name.endswith(_CLASSIFIER) for name in architectures):
        raise ValueError(
            f"config.json: architectures is {architectures}, a model without a language model's output projection; it "
            "needs TrainerConfig.head 'value', not 'lm'"
        )


def check_supported(config: Mapping[str, Any]) -> HFModelConfig:
    """Parses the contents of a `config.json`. Raises ValueError naming the key, its value and what is supported."""
    architectures: list[str] = config.get("architectures") or []
    backbones = [name.removesuffix(_CLASSIFIER) + _LM if name.endswith(_CLASSIFIER) else name for name in architectures]
    family: Family | None = next((_FAMILIES[name] for name in backbones if name in _FAMILIES), None)
    if family is None:
        raise ValueError(
            f"config.json: architectures is {architectures}; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    for key in _REQUIRED:
        if key not in config:
            raise ValueError(f"config.json lacks {key!r}")
    _refuse_options(config)
    num_heads = int(config["num_attention_heads"])
    dim = int(config["hidden_size"])
    rope_theta, rope_scaling = _read_rope(config)
    return HFModelConfig(
        family=family,
        vocab_size=int(config["vocab_size"]),
        dim=dim,
        hidden_dim=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or (128 if family == "qwen3" else dim // num_heads)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_seq_len=int(config.get("max_position_embeddings", 2048)),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        moe=_read_moe(config) if family == "qwen3_moe" else None,
    )


def _read_moe(config: Mapping[str, Any]) -> HFMoEConfig:
    """Reads both spellings, `num_local_experts` of transformers 5 and the older `num_experts`."""
    num_experts = int(config.get("num_local_experts", config.get("num_experts", 128)))
    experts_per_token = int(config.get("num_experts_per_tok", 8))
    if not 1 <= experts_per_token <= num_experts:
        raise ValueError(
            f"config.json: num_experts_per_tok is {experts_per_token}; it must be between 1 and the {num_experts} "
            "experts of a layer"
        )
    return HFMoEConfig(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        hidden_dim=int(config.get("moe_intermediate_size", 768)),
        normalize_scores=bool(config.get("norm_topk_prob", False)),
    )


def _refuse_options(config: Mapping[str, Any]) -> None:
    accepted: dict[str, Any] = {
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }
    for key, supported in accepted.items():
        value = config.get(key)
        if value is not None and value != supported:
            raise ValueError(f"config.json: {key} is {value!r}; only {supported!r} is supported")
    if config.get("quantization_config") is not None:
        raise ValueError("config.json: quantization_config is set; only unquantized weights can be trained")


def _read_rope(config: Mapping[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return theta, None
    if rope_type == "llama3":
        return theta, Llama3RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
        )
    raise ValueError(f"config.json: rope_type is {rope_type!r}; supported are 'default' and 'llama3'")
