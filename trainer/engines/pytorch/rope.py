"""The frequencies of rotary embeddings as transformers computes them."""

import math

import torch
from torch import Tensor

from trainer.engines.decoder_config import DecoderConfig, Llama3RopeScaling


def inverse_frequencies(config: DecoderConfig) -> Tensor:
    """[head_dim / 2] float32 angles per position, the fastest first."""
    inv_freq = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    return inv_freq if config.rope_scaling is None else scale_llama3(inv_freq, config.rope_scaling)


def scale_llama3(inv_freq: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Stretches long wavelengths by the factor, keeps short ones and interpolates in between (arXiv 2407.21783)."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    rotations = scaling.original_max_position_embeddings * inv_freq / (2 * math.pi)
    kept = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inv_freq / scaling.factor + kept * inv_freq
