"""Reads the weights of a Hugging Face model directory into parameters that may be sharded."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem

from rl.system.model_files import weight_files

VALUE_HEAD = "score.weight"
"""Name of a value head's parameter, [1, dim]. transformers' sequence classifiers use it, and reward models are
published and served by vLLM in that form."""


class _Listed(FileSystem):
    """Shows a reader some files of a directory: torch's reader would take every safetensors file."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = [str(file) for file in files]

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        """The files; `path` is not looked at."""
        del path
        return self._files


def load_hf_weights(parameters: dict[str, torch.Tensor], path: Path) -> None:
    """Fills parameters in place from the files of a model directory. Each rank reads only its shards.

    A value head that the files lack becomes zero, so that all values begin at 0.

    Raises ValueError if there are no files, or if they lack a parameter or hold one of another shape.
    """
    reader = HuggingFaceStorageReader(str(path))
    reader.fs = _Listed(weight_files(path))
    stored = reader.read_metadata().state_dict_metadata
    if VALUE_HEAD in parameters and VALUE_HEAD not in stored:
        torch.nn.init.zeros_(parameters[VALUE_HEAD])
        parameters = {name: parameter for name, parameter in parameters.items() if name != VALUE_HEAD}
    for name, parameter in parameters.items():
        if name not in stored:
            raise ValueError(f"{path} holds no weight {name!r}")
        shape = tuple(getattr(stored[name], "size", ()))
        if shape != tuple(parameter.shape):
            raise ValueError(f"{path}: {name} has shape {shape}; config.json asks for {tuple(parameter.shape)}")
    dcp.load(dict(parameters), storage_reader=reader)
