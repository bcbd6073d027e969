"""Requests that cannot begin, are cancelled, or whose client or session has ended: nothing goes on for nobody."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker", reason="the tinker package is not installed: pip install 'ownloop[tinker]'")

from tinker import types

from controller.gateway.gateway import ClientSession, Gateway
from rl.types import Completion
from tests.controller.gateway.toy_model import ToyGenerator, ToyHost


class EndlessGenerator(ToyGenerator):
    """Samples for ever."""

    num_running = 0

    async def generate(self, *_: Any, **__: Any) -> list[Completion]:
        self.num_running += 1
        try:
            await asyncio.Event().wait()
            raise AssertionError("for ever")
        finally:
            self.num_running -= 1


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 30))


def make_gateway(folder: Path) -> tuple[Gateway, EndlessGenerator, ClientSession]:
    host = ToyHost()
    host.generator = generator = EndlessGenerator(host)
    gateway = Gateway([host.served(folder / "recovery")], folder)
    request = types.CreateSessionRequest(tags=[], user_metadata=None, sdk_version="0.38.0")
    return gateway, generator, gateway.open_session(request)


def test_a_training_client_whose_row_cannot_be_saved_is_made_when_it_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise OSError("database or disk is full")

    async def body() -> None:
        gateway, _, session = make_gateway(tmp_path)
        lora = types.LoraConfig(rank=4)
        request = types.CreateModelRequest(session_id=session.id, model_seq_id=0, base_model="toy", lora_config=lora)
        with monkeypatch.context() as patch:
            patch.setattr(gateway.database, "save", fail)
            with pytest.raises(OSError, match="disk is full"):
                gateway.create(request)
        assert gateway.answers.num_waiting == 0
        result = await gateway.create(request).wait(20)
        assert result is not None
        assert b"error" not in result.content
        await gateway.close()

    run(body())
