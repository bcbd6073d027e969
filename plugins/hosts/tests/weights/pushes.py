"""Versions of a small model, how tests push them over the network, and what a host has of them."""

import asyncio
from typing import Any

import pytest
import torch

from plugins.hosts.tests.weights.receiving_hosts import read_at
from rl.weights.version import VersionRecord
from tests.stores import FakeStore
from trainer.push import WeightPublisher

Tensors = dict[str, torch.Tensor]


def weights(seed: int) -> Tensors:
    """A tensor that is cut into several messages, some that share one, and a scalar."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"embedding": (3000, 1000), "norm": (576,), "scale": (), "up": (300, 7), "down": (700, 1000)}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def publisher_to(store: FakeStore, **options: Any) -> WeightPublisher:
    """A publisher that finds its hosts in a store."""
    return WeightPublisher(torch.float32, "network", store=store, **options)


def push(publisher: WeightPublisher, version: int) -> VersionRecord:
    """Pushes a version."""
    record = asyncio.run(publisher.publish(version, weights(version).items()))
    assert record is not None
    return record


def assert_read(identity: str, record: VersionRecord, patch: pytest.MonkeyPatch) -> None:
    """Raises AssertionError unless a host has exactly what was pushed."""
    read = read_at(identity, record, patch)
    for name, tensor in weights(record.version).items():
        assert torch.equal(read[name], tensor), name
