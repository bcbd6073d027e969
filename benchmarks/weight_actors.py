"""The processes that `weight_sync` measures, in a module that Monarch's processes can import."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from monarch.actor import Actor, endpoint
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rl.weights.version import VersionRecord
from trainer.push import WeightPublisher


class TrainerRank(Actor):
    """One trainer rank with float32 master weights, which `step` changes a little as an optimizer would.

    Each of several ranks holds a shard of every weight, as FSDP2 lays them out.
    """

    def __init__(self, directory: Path, dtype: torch.dtype, store_name: str) -> None:
        """Loads the weights of a model's directory; `dtype` is the generator's."""
        weights = {name: tensor.float() for name, tensor in load_file(directory / "model.safetensors").items()}
        weights.pop("lm_head.weight", None)  # tied to the embedding, which is published once
        num_elements = sum(tensor.numel() for tensor in weights.values())
        if int(os.environ["WORLD_SIZE"]) > 1:
            dist.init_process_group("gloo")
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for name, tensor in weights.items():
                weights[name] = distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
        self._masters = weights
        self._dtype = dtype
        self._publisher = WeightPublisher(dtype, "shared_memory", store_name=store_name)
        self._store_name = store_name
        self._copies = (torch.ones(num_elements, dtype=dtype), torch.zeros(num_elements, dtype=dtype))

    @endpoint
    async def num_bytes(self) -> int:
        """Size of the published weights."""
        return self._copies[0].nbytes

    @endpoint
    async def copy(self) -> float:
        """Seconds of one plain copy of as many bytes as are published, into memory that has been touched before."""
        begin = time.perf_counter()
        self._copies[1].copy_(self._copies[0])
        return time.perf_counter() - begin

    @endpoint
    async def step(self) -> None:
        """Changes one element of every weight."""
        for tensor in self._masters.values():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.view(-1)[:1] += 1e-3

    @endpoint
    async def publish(self, version: int) -> tuple[float, VersionRecord | None]:
        """Publishes the weights. Returns the seconds it took and what `WeightPublisher.publish` returns."""
        begin = time.perf_counter()
        record = await self._publisher.publish(version, self._masters.items())
        return time.perf_counter() - begin, record

    @endpoint
    async def put(self, key: str) -> float:
        """Casts the weights and puts them into TorchStore as a state dict; returns the seconds it took."""
        import torchstore  # here and below, because a module that imports Monarch first also configures it

        begin = time.perf_counter()
        weights = {name: t.to(self._dtype) for name, t in self._masters.items()}
        await torchstore.put_state_dict(weights, key, store_name=self._store_name)
        return time.perf_counter() - begin


class StateDictReader(Actor):
    """One rank that holds a model's tensors and gets new values for them from TorchStore."""

    def __init__(self, directory: Path, dtype: torch.dtype, store_name: str) -> None:
        """Loads the tensors of a model's directory in `dtype`."""
        weights = load_file(directory / "model.safetensors")
        self._store_name = store_name
        self._weights = {name: t.to(dtype) for name, t in weights.items() if name != "lm_head.weight"}

    @endpoint
    async def get(self, key: str) -> float:
        """Gets a state dict from TorchStore and copies it into this rank's tensors; returns the seconds it took."""
        import torchstore

        begin = time.perf_counter()
        fetched = await torchstore.get_state_dict(key, store_name=self._store_name)
        for name, tensor in self._weights.items():
            tensor.copy_(fetched[name])
        return time.perf_counter() - begin
