"""Training backends: one file or folder each and a row in the table below."""

import importlib
from collections.abc import Mapping

from trainer.config import TrainerConfig
from trainer.engines.base import Engine
from trainer.engines.model_check import check_model

ENGINES: Mapping[str, str] = {
    "torchtitan": "trainer.engines.titan.engine:TitanEngine",
    "fsdp2": "trainer.engines.hf.fsdp2:Fsdp2Engine",
    "fsdp1": "trainer.engines.hf.fsdp1:Fsdp1Engine",
}


def load_engine(config: TrainerConfig) -> Engine:
    """Builds this rank's engine. With several ranks, torch's RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set.

    Raises ValueError for a model or a layout that the engine cannot train.
    """
    check_model(config)
    module, _, name = ENGINES[config.engine].partition(":")
    return getattr(importlib.import_module(module), name)(config)
