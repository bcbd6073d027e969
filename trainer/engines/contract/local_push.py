"""A push to nobody: what generators would be given, read back in the same process."""

import asyncio
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rl.weights.buffer import WeightBuffer
from rl.weights.versions import living_versions
from trainer.push import WeightPublisher


def published(version: int, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Publishes parameters in float32 and returns what lies in shared memory then, on rank 0; {} on other ranks.

    A collective.
    """
    store = LocalStore()
    publisher = WeightPublisher(torch.float32, "shared_memory", store=store)
    asyncio.run(publisher.publish(version, parameters))
    if not store.values:
        return {}
    record = asyncio.run(living_versions(store))[-1]
    buffer = WeightBuffer.open(record.location)
    with buffer.reading(record):
        buffer.check_checksums(record)
        return {spec.name: buffer.tensor(spec).clone() for spec in record.manifest}


class LocalStore:
    """A dictionary with TorchStore's interface."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    async def put(self, key: str, value: Any) -> None:
        """See `Store`."""
        self.values[key] = value

    async def get(self, key: str) -> Any:
        """See `Store`."""
        return self.values[key]

    async def delete(self, key: str) -> None:
        """See `Store`."""
        del self.values[key]
