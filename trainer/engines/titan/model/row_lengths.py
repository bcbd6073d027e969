"""The lengths to which packed rows are padded for torchtitan's models."""

import math

import torch

from trainer.config import TrainerConfig

# Positions per block of a block mask, on a GPU.
_BLOCK = 128
# torchao's float8 kernels need the inner size of a product to be a multiple of this.
_FLOAT8_MULTIPLE = 16


def row_multiple(config: TrainerConfig, device: torch.device) -> int:
    """The number of which a row's length must be a multiple, for equal shards and for float8."""
    if config.context_parallel == 1:
        # Experts take their tokens from equal parts of the sequence; stages exchange equal parts of it.
        parts = config.tensor_parallel if config.expert_parallel > 1 or config.pipeline_parallel > 1 else 1
        # The gradient of a float8 weight sums over tokens, which its kernel takes in multiples.
        return math.lcm(parts, _FLOAT8_MULTIPLE if config.float8 != "none" else 1)
    block = 1 if device.type == "cpu" else _BLOCK
    return 2 * config.context_parallel * config.tensor_parallel * block


def row_length(length: int, multiple: int) -> int:
    """The length to which a row of this many tokens is padded for a kernel that is compiled for its lengths.

    There are at most 8 lengths between a number and its double, so that a run soon has seen all of them; less than an
    eighth of a row is padding, beside what `multiple` needs.
    """
    step = 1 << max(0, length.bit_length() - 4)
    stepped = -(-length // step) * step
    return -(-stepped // multiple) * multiple
