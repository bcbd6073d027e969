"""A TorchStore of one process, and what was published through it."""

import asyncio
from typing import Any

import torch

from rl.weights.memory import WeightBuffer
from rl.weights.store import living_versions, tensor_key
from rl.weights.version import VersionRecord


class FakeStore:
    """A dictionary with TorchStore's interface."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    async def put(self, key: str, value: Any) -> None:
        self.values[key] = value

    async def get(self, key: str) -> Any:
        if key not in self.values:
            raise KeyError(f"Unable to locate {key} in any storage volumes.")
        return self.values[key]

    async def delete(self, key: str) -> None:
        del self.values[key]


def living(store: FakeStore) -> tuple[VersionRecord, ...]:
    """The versions that can be pulled, oldest first; for tests that are not in an event loop."""
    return asyncio.run(living_versions(store))


def read_buffer(record: VersionRecord) -> dict[str, torch.Tensor]:
    """A copy of every tensor of a version in shared memory."""
    buffer = WeightBuffer.open(record.location)
    with buffer.reading(record):
        buffer.check_checksums(record)
        return {spec.name: buffer.tensor(spec).clone() for spec in record.manifest}


def key_of(record: VersionRecord, name: str) -> str:
    """TorchStore's key of a tensor."""
    return tensor_key(record, next(spec for spec in record.manifest if spec.name == name))
