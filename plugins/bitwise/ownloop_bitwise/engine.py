"""The engine `bitwise`: torchtitan's, whose forward pass computes bit by bit what a generator of this plug-in does."""

import socket
from pathlib import Path

import torch
import torch.distributed

from ownloop_bitwise.library import bfloat16_path, check_one_path, kernels
from ownloop_bitwise.packed import packing_layers
from ownloop_bitwise.shape import read_shape
from rl.system.decoders import DecoderConfig
from trainer.config import TrainerConfig
from trainer.engines.titan.engine import TitanEngine


def _path(device: torch.device, dtype: str) -> str:
    """What all processes of a run must have in common; "" if nothing."""
    if device.type != "cpu":
        from ownloop_bitwise.cuda import prepare  # imports vLLM

        return prepare()
    kernels()
    return bfloat16_path() if dtype == "bfloat16" else ""


class BitwiseEngine(TitanEngine):
    """One rank of a torchtitan model that computes by the kernels."""

    def __init__(self, config: TrainerConfig) -> None:
        """As `TitanEngine`. On a CPU it compiles the kernels, if no process of this host has done so."""
        super().__init__(config)
        for layer in packing_layers(self._model):
            layer.keeps_packed = config.num_ranks == 1
        if path := _path(self._device, config.compute_dtype):
            self.arithmetic = f"{path} in the trainer on {socket.gethostname()}"
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
