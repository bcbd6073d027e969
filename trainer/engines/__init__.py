"""Training backends, one folder each. `trainer.engine_table` lists them."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from trainer.config import TrainerConfig
from trainer.engine_table import find_engine
from trainer.engines.model_check import check_model

if TYPE_CHECKING:  # the import would load torch
    from trainer.engines.base import Engine


def load_engine(config: TrainerConfig) -> "Engine":
    """Builds this rank's engine. With several ranks, torch's RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set.

    Raises ValueError for a model or a layout that the engine cannot train.
    """
    check_model(config)
    engine = resolve_name(find_engine(config.engine).engine)(config)
    if not config.is_frozen:
        return engine
    # Imported here, because the controller imports this package to check layouts, without engines.
    from trainer.engines.pytorch.frozen_base import FrozenBase

    return FrozenBase(config, engine)
