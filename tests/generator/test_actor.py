"""What one rank's actor adds to its engine, which is a fake."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

import generator.actor
from generator.actor import VLLMGenerator


def test_a_version_to_be_kept_may_wait_behind_running_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def client(store_name: str) -> object:
        assert store_name == "weights"
        return object()

    async def freeze(name: str, version: int) -> bool:
        for _ in range(5):  # an update before it waits for requests
            await asyncio.sleep(0)
        return (name, version) == ("a", 3)

    monkeypatch.setattr(generator.actor.torchstore, "client", client)
    rank: Any = SimpleNamespace(_engine=SimpleNamespace(freeze=freeze), _store_name="weights", _store_timeout_s=0)
    endpoint: Any = VLLMGenerator.pull_model_state_dict
    asyncio.run(endpoint._method.__wrapped__(rank, 3, None, "a", True, "drain", False))
