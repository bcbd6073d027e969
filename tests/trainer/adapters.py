"""Adapters to test with."""

import zlib

import torch

from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Engine


def randomize(engine: Engine, seed: int = 0) -> Engine:
    """Gives a new adapter a B other than zero, with which A has gradients too."""
    for name, parameter in engine.hf_parameters():
        if "lora_B" in name:  # a rank may hold some of the layers only
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            parameter.data.normal_(std=0.1, generator=generator)
    return engine


def load_engine_or_adapter(config: TrainerConfig) -> Engine:
    """The engine of a model or, with `lora`, of an adapter over it whose B is not zero."""
    engine = load_engine(config)
    return engine if config.lora is None else randomize(engine.adapter("a", config.lora))
