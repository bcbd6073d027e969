"""Which models have the kernels for all that they compute, and the rotations that trainer and generator share.

Imports no torch, so that a model is refused before any process starts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ownloop_bitwise.library import find_compiler, instruction_set
from rl.system.decoders import CLASSIFIER_SUFFIX, DENSE, LM_SUFFIX, DecoderConfig, find_dense
from rl.system.hf_config import parse_decoder_config, read_config

FAMILIES = ("ernie4_5", "exaone4", "llama", "qwen2", "qwen3")
"""The families, by whose layers torchtitan builds a model; Mistral's and SmolLM2's models are built as Llama's."""
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

    @property
    def is_gemma2(self) -> bool:
        """Whether layers have norms after their parts too, and a GELU, and embeddings are scaled."""
        return self.family == "gemma2"


def check_host(has_gpu: bool) -> None:
    """Raises ValueError for a host that cannot compute so."""
    if has_gpu:
        raise ValueError(
            "numerics is 'bitwise', which computes on CPUs, and this host has a GPU; leave numerics out, or hide the "
            "GPU with CUDA_VISIBLE_DEVICES=''"
        )
    instruction_set()
    find_compiler()


def as_llama(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a model whose windows, caps and norms are this module's, as a Llama of the same sizes."""
    row = find_dense(hf_config.get("architectures"))
    if row is None or row.name not in ("gemma2", "mistral"):
        return hf_config
    gelu = {"hidden_act": hf_config.get("hidden_activation"), "hidden_activation": None}
    if row.name == "gemma2" and gelu["hidden_act"] == "gelu_pytorch_tanh":
        gelu["hidden_act"] = "silu"
    suffix = "ForSequenceClassification" if hf_config["architectures"][0].endswith(CLASSIFIER_SUFFIX) else LM_SUFFIX
    return {
        **hf_config,
        **(gelu if row.name == "gemma2" else {}),
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
        covered = sorted(row.architecture for row in DENSE if row.built_as in FAMILIES or row.name == "gemma2")
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
    if name != "gemma2":
        return {}
    kinds = hf_config.get("layer_types") or ("sliding_attention", "full_attention") * shape.num_layers
    return {
        "family": "gemma2",
        "windows": tuple(window if kind == "sliding_attention" else 0 for kind in kinds[: shape.num_layers]),
        "attention_cap": float(hf_config.get("attn_logit_softcapping") or 0),
        "attention_scale": float(hf_config["query_pre_attn_scalar"]) ** -0.5,
        "logit_cap": hf_config.get("final_logit_softcapping"),
    }


def read_shape(model: Path) -> BitwiseDecoder:
    """The shape of the model in a directory. Raises ValueError as `shape_of` does."""
    return shape_of(read_config(model))


def inverse_frequencies(shape: DecoderConfig) -> tuple[float, ...]:
    """[head_dim / 2] angles per position, the fastest first, each a float32 as in transformers."""
    frequencies = shape.rope_theta ** -(np.arange(0, shape.head_dim, 2) / shape.head_dim)
    if (scaling := shape.rope_scaling) is not None:
        # https://arxiv.org/abs/2407.21783, section 3.4.2, as transformers computes it.
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        frequencies = frequencies * ((1 - smooth) / scaling.factor + smooth)
    return tuple(float(each) for each in frequencies.astype(np.float32))
