"""An actor that publishes weights without training any. In a module of its own: the processes import it."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from monarch.actor import Actor, endpoint
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rl.weights import Transport
from trainer.weights import WeightPublisher


def perturbed(directory: Path, version: int) -> Mapping[str, torch.Tensor]:
    """A model directory's float32 weights, moved by an amount that depends on the version; 0 leaves them."""
    generator = torch.Generator().manual_seed(version)
    weights = load_file(directory / "model.safetensors")
    return {
        name: tensor.float() + 0.02 * (version > 0) * torch.randn(tensor.shape, generator=generator)
        for name, tensor in sorted(weights.items())
    }


class Publisher(Actor):
    """One rank that holds a shard of every weight, as FSDP2 does."""

    def __init__(self, directory: Path, dtype: torch.dtype, transport: Transport) -> None:
        """The weights come from `directory`."""
        self._directory = directory
        self._mesh = None
        if int(os.environ["WORLD_SIZE"]) > 1:
            dist.init_process_group("gloo")
            self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._publisher = WeightPublisher(dtype, transport)

    @endpoint
    async def publish(self, version: int, drop: tuple[str, ...] = ()) -> None:
        """Publishes the perturbed weights, without those in `drop`."""
        weights = {name: t for name, t in perturbed(self._directory, version).items() if name not in drop}
        if self._mesh is not None:
            weights = {name: distribute_tensor(t, self._mesh, [Shard(0)]) for name, t in weights.items()}
        await self._publisher.publish(version, weights.items())

    @endpoint
    async def pid(self) -> int:
        """Of this process."""
        return os.getpid()
