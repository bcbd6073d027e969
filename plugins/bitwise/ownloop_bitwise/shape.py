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
from rl.system.decoders import DENSE, DecoderConfig
from rl.system.hf_config import parse_decoder_config, read_config

FAMILIES = ("ernie4_5", "exaone4", "llama", "qwen2", "qwen3")
"""The families, by whose layers torchtitan builds a model; Mistral's and SmolLM2's models are built as Llama's."""
DTYPES = ("bfloat16", "float32")
_LEAVE_OUT = "Other models train with numerics left out"


@dataclass(frozen=True, slots=True, kw_only=True)
class BitwiseDecoder(DecoderConfig):
    """The shape of a decoder whose layers compute with the kernels."""

    spec: ClassVar[str] = "ownloop_bitwise.titan:build_spec"

    @classmethod
    def of(cls, shape: DecoderConfig) -> "BitwiseDecoder":
        """The same shape."""
        return cls(**{each.name: getattr(shape, each.name) for each in fields(shape)})


def check_host(has_gpu: bool) -> None:
    """Raises ValueError for a host that cannot compute so."""
    if has_gpu:
        raise ValueError(
            "numerics is 'bitwise', which computes on CPUs, and this host has a GPU; leave numerics out, or hide the "
            "GPU with CUDA_VISIBLE_DEVICES=''"
        )
    instruction_set()
    find_compiler()


def shape_of(hf_config: Mapping[str, Any]) -> DecoderConfig:
    """The shape of the model of a `config.json`. Raises ValueError for one that has layers without a kernel."""
    try:
        shape = parse_decoder_config(hf_config)
    except ValueError as error:
        raise ValueError(f"{error}. {_LEAVE_OUT}") from error
    if type(shape) is not DecoderConfig or shape.moe is not None or shape.family not in FAMILIES:
        covered = sorted(row.architecture for row in DENSE if row.built_as in FAMILIES)
        raise ValueError(
            f"numerics is 'bitwise', which has no kernels for the layers of {shape.family!r}; it has them for "
            f"{', '.join(covered)}. {_LEAVE_OUT}"
        )
    return shape


def read_shape(model: Path) -> DecoderConfig:
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
