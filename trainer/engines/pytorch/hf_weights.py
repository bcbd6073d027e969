"""Reads the weights of a Hugging Face model directory into parameters that may be sharded."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

VALUE_HEAD = "score.weight"
"""Name of a value head's parameter, [1, dim]. transformers' sequence classifiers use it, and reward models are
published and served by vLLM in that form."""


def load_hf_weights(parameters: dict[str, torch.Tensor], path: Path) -> None:
    """Fills parameters in place from the safetensors files in `path`. Each rank reads only its shards.

    A value head that the files lack becomes zero, so that all values begin at 0.

    Raises ValueError if there are no files, or if they lack a parameter or hold one of another shape.
    """
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"model is {str(path)!r}, which has no *.safetensors files")
    reader = HuggingFaceStorageReader(str(path))
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
