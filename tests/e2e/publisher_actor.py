"""An actor that publishes weights without training any. In a module of its own: the processes import it."""

import os
import resource
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from monarch.actor import Actor, endpoint
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rl.types import WeightTransport
from trainer.push import WeightPublisher


def perturbed(directory: Path, seed: int) -> Mapping[str, torch.Tensor]:
    """A model directory's weights in float32, every one of them moved by an amount that depends on the seed."""
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(directory / "model.safetensors")
    return {
        name: tensor.float() + 0.02 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in sorted(weights.items())
    }


class Publisher(Actor):
    """One rank that holds a shard of every weight, as FSDP2 does."""

    def __init__(self, directory: Path, dtype: torch.dtype, transport: WeightTransport, store_name: str) -> None:
        """The weights come from `directory`."""
        self._directory = directory
        self._store_name = store_name
        self._mesh = None
        if int(os.environ["WORLD_SIZE"]) > 1:
            dist.init_process_group("gloo")
            self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._publisher = WeightPublisher(dtype, transport, store_name=self._store_name)

    @endpoint
    async def renew(self, dtype: torch.dtype, transport: WeightTransport) -> None:
        """Publishes from new buffers and as a trainer that was just started, without the seconds that this takes."""
        self._publisher = WeightPublisher(dtype, transport, store_name=self._store_name)

    @endpoint
    async def limit_shared_memory(self) -> None:
        """From now on the kernel refuses this process what is larger than 64 KiB."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    @endpoint
    async def publish(self, version: int, seed: int, drop: tuple[str, ...] = ()) -> None:
        """Publishes the weights perturbed by `seed`, without those in `drop`."""
        weights = {name: tensor for name, tensor in perturbed(self._directory, seed).items() if name not in drop}
        if self._mesh is not None:
            weights = {name: distribute_tensor(tensor, self._mesh, [Shard(0)]) for name, tensor in weights.items()}
        await self._publisher.publish(version, weights.items())
