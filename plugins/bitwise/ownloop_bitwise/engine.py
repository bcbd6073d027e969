"""The engine `bitwise`: torchtitan's, whose forward pass computes bit by bit what a generator of this plug-in does."""

import socket
from pathlib import Path

import torch.distributed

from ownloop_bitwise.library import bfloat16_path, check_one_path, kernels
from ownloop_bitwise.packed import packing_layers
from ownloop_bitwise.shape import read_shape
from rl.system.decoders import DecoderConfig
from trainer.config import TrainerConfig
from trainer.engines.titan.engine import TitanEngine


class BitwiseEngine(TitanEngine):
    """One rank of a torchtitan model that computes by the kernels."""

    def __init__(self, config: TrainerConfig) -> None:
        """As `TitanEngine`. Compiles the kernels, if no process of this host has done so."""
        kernels()
        super().__init__(config)
        for layer in packing_layers(self._model):
            layer.keeps_packed = config.num_ranks == 1
        if config.compute_dtype == "bfloat16":
            self.arithmetic = f"{bfloat16_path()} in the trainer on {socket.gethostname()}"
            if config.num_ranks > 1:
                self._check_ranks()

    def _check_ranks(self) -> None:
        """Raises ValueError unless all ranks have one path."""
        places = [self.arithmetic] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(places, self.arithmetic)
        check_one_path({where: path for path, _, where in (each.partition(" in ") for each in places)})

    def _shape(self, model: Path) -> DecoderConfig:
        return read_shape(model)

    def _refresh_compute_copies(self) -> None:
        super()._refresh_compute_copies()
        for layer in packing_layers(self._model):
            layer.drop_packed()
