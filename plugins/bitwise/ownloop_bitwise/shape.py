"""Which models have the kernels for all that they compute, and the rotations that trainer and generator share.

Imports no torch, so that a model is refused before any process starts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ownloop_bitwise.library import find_compiler, instruction_set
from rl.system.decoders import CLASSIFIER_SUFFIX, DENSE, LM_SUFFIX, DecoderConfig, DenseFamily, find_dense
from rl.system.hf_config import parse_decoder_config, read_config

FAMILIES = ("ernie4_5", "exaone4", "llama", "qwen2", "qwen3")
"""The families, by whose layers torchtitan builds a model; Mistral's and SmolLM2's models are built as Llama's."""
_GEMMAS = ("gemma2", "gemma3")
DTYPES = ("bfloat16", "float32")
_LEAVE_OUT = "Other models train with numerics left out"


@dataclass(frozen=True, slots=True, kw_only=True)
class BitwiseDecoder(DecoderConfig):
    """The shape of a decoder whose layers compute with the kernels."""

    spec: ClassVar[str] = "ownloop_bitwise.titan:build_spec"

    windows: tuple[int, ...] = ()
    """Of each layer: how many tokens a token attends to, itself among them; 0 for all. Empty stands for zeros."""
    attention_cap: float = 0.0
    """Of scores; 0 for none."""
    attention_scale: float | None = None
    """What products of queries and keys are multiplied by; by default 1 / sqrt(head_dim)."""
    logit_cap: float | None = None

    ropes: tuple[tuple[float, float], ...] = ()
    """Of each layer: the base of its rotations, and what its angles are divided by. Empty where all layers have
    `rope_theta` and `rope_scaling`."""

    @property
    def row(self) -> DenseFamily:
        """As `DecoderConfig.row`; the core's says little of a family that it does not build."""
        row = DecoderConfig.row.fget(self)  # pyright: ignore[reportOptionalCall] - super() knows no class with slots
        return replace(row, qk_norm="before") if self.family == "gemma3" else row

    @property
    def is_gemma(self) -> bool:
        """Whether layers have norms after their parts too, and a GELU, and embeddings are scaled."""
        return self.family in _GEMMAS


def check_host(has_gpu: bool) -> None:
    """Raises ValueError for a host whose CPU is to compute so, and cannot."""
    if not has_gpu:
        instruction_set()
        find_compiler()


def refused_on_gpus(field: str, value: object, instead: str) -> ValueError:
    """The error of what is written for CPUs only."""
    return ValueError(
        f"{field} is {value!r}; on GPUs, numerics 'bitwise' takes none: {instead}, or hide the GPU with "
        "CUDA_VISIBLE_DEVICES=''"
    )


def as_llama(hf_config: Mapping[str, Any]) -> Mapping[str, object]:
    """The settings of a model whose windows, caps and norms are this module's, as a Llama of the same sizes."""
    row = find_dense(hf_config.get("architectures"))
    if row is None or row.name not in (*_GEMMAS, "mistral"):
        return hf_config
    own: dict[str, object] = {}
    if row.name in _GEMMAS and hf_config.get("hidden_activation") == "gelu_pytorch_tanh":
        own["hidden_act"] = "silu"
    elif row.name in _GEMMAS:
        own["hidden_act"] = hf_config.get("hidden_activation")
    if row.name == "gemma3":
        own["rope_parameters"] = None
    suffix = "ForSequenceClassification" if hf_config["architectures"][0].endswith(CLASSIFIER_SUFFIX) else LM_SUFFIX
    return {
        **hf_config,
        **own,
        "architectures": [f"Llama{suffix}"],
        "sliding_window": None,
    }


def shape_of(hf_config: Mapping[str, Any]) -> BitwiseDecoder:
    """The shape of the model of a `config.json`. Raises ValueError for one that has layers without a kernel."""
    try:
        shape = parse_decoder_config(as_llama(hf_config))
    except ValueError as error:
        raise ValueError(f"{error}. {_LEAVE_OUT}") from error
    if type(shape) is not DecoderConfig or shape.moe is not None or shape.family not in FAMILIES:
        covered = sorted(row.architecture for row in DENSE if row.built_as in FAMILIES or row.name in _GEMMAS)
        raise ValueError(
            f"numerics is 'bitwise', which has no kernels for the layers of {shape.family!r}; it has them for "
            f"{', '.join(covered)}. {_LEAVE_OUT}"
        )
    row = find_dense(hf_config.get("architectures"))
    own = {} if row is None else _own_settings(row.name, shape, hf_config)
    return BitwiseDecoder(**{each.name: getattr(shape, each.name) for each in fields(shape)} | own)


def _own_settings(name: str, shape: DecoderConfig, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """What the core's shape of a model of this row does not say."""
    window = int(hf_config.get("sliding_window") or 0)
    if name == "mistral" and window:
        return {"windows": (window,) * shape.num_layers}
    if name not in _GEMMAS:
        return {}
    kinds = hf_config.get("layer_types") or ("sliding_attention", "full_attention") * shape.num_layers
    kinds = kinds[: shape.num_layers]
    return {
        "family": name,
        "ropes": tuple(_rope(hf_config["rope_parameters"][kind]) for kind in kinds) if name == "gemma3" else (),
        "windows": tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
        "attention_cap": float(hf_config.get("attn_logit_softcapping") or 0),
        "attention_scale": float(hf_config["query_pre_attn_scalar"]) ** -0.5,
        "logit_cap": hf_config.get("final_logit_softcapping"),
    }


def _rope(parameters: Mapping[str, Any]) -> tuple[float, float]:
    """Base and divisor. Raises ValueError for another kind than those of Gemma 3."""
    kind = parameters.get("rope_type", "default")
    if kind not in ("default", "linear"):
        raise ValueError(
            f"config.json: rope_type is {kind!r}; for this family 'default' and 'linear' are supported. {_LEAVE_OUT}"
        )
    return float(parameters["rope_theta"]), float(parameters["factor"]) if kind == "linear" else 1.0


def read_shape(model: Path) -> BitwiseDecoder:
    """The shape of the model in a directory. Raises ValueError as `shape_of` does."""
    return shape_of(read_config(model))


def inverse_frequencies(shape: BitwiseDecoder, layer: int) -> tuple[float, ...]:
    """[head_dim / 2] angles per position, the fastest first, each a float32 as in transformers."""
    theta, divisor = shape.ropes[layer] if shape.ropes else (shape.rope_theta, 1.0)
    frequencies = theta ** -(np.arange(0, shape.head_dim, 2) / shape.head_dim) / divisor
    if (scaling := shape.rope_scaling) is not None:
        # https://arxiv.org/abs/2407.21783, section 3.4.2, as transformers computes it.
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        frequencies = frequencies * ((1 - smooth) / scaling.factor + smooth)
    return tuple(float(each) for each in frequencies.astype(np.float32))
