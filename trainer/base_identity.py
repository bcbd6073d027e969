"""What tells one model from another of the same shape: a hash of samples of its weights.

Samples are read from the model's files, so that the hash depends neither on the layout nor on how the files are split.
They are compared as float32, so that a model and its copy in a wider dtype are the same.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

from rl.system.model_files import weight_files
from trainer.checkpoint import on_rank_0


def base_identity(path: Path) -> Mapping[str, str]:
    """The name of a model's directory and a hash of its tensors' names, shapes and samples.

    The samples are the first and the middle row of each tensor. A collective: rank 0 reads the files.
    """
    found: list[Mapping[str, str]] = [{}]

    def read() -> None:
        found[0] = {"name": path.resolve().name, "weights": _hash(path)}

    on_rank_0(read)
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    return found[0]


def _hash(path: Path) -> str:
    samples: dict[str, bytes] = {}
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dictionary
                part = tensors.get_slice(name)
                shape: list[int] = part.get_shape()
                middle = shape[0] // 2
                rows = torch.cat([part[:1], part[middle : middle + 1]])
                samples[name] = str(shape).encode() + rows.float().numpy().tobytes()
    digest = hashlib.sha256()
    for name in sorted(samples):
        digest.update(name.encode() + samples[name])
    return digest.hexdigest()[:16]
