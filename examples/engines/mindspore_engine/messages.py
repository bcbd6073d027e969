"""What the engine and its MindSpore process say to each other. Both import this module, so it needs only NumPy.

Legend: L tokens of a row, P scored pairs, H half the size of an attention head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a decoder needs to know besides its parameters."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A packed row, as arrays."""

    tokens: Ints
    """[L]"""
    cos: Floats
    """[L, H] of the rotary embeddings' angles."""
    sin: Floats
    """[L, H]"""
    mask: Floats
    """[L, L] what is added to the scores of attention: 0 where a token attends to another, else -inf."""
    scored: Ints
    """[P] indices into the row."""
    targets: Ints
    """[P] the tokens to score."""
    scale: Floats
    """[P] what logits are multiplied by: the inverse temperatures."""
    cut: Floats
    """[P, V] what is added to them then, or [1, 1]: 0, and a number far below 0 for tokens that were cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamStep:
    """One AdamW step of all parameters."""

    factor: float
    """Multiplies the gradient: its scale and its clipping."""
    learning_rates: Mapping[str, float]
    """Of every parameter."""
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """AdamW's state of one parameter."""

    step: int
    """Steps taken."""
    mean: NDArray[Any]
    """Running mean of the gradient."""
    square: NDArray[Any]
    """Running mean of the squared gradient."""
