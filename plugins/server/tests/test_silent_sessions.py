"""Sessions that send no heartbeat end, with their adapters and their places. The half hours are of a virtual clock."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker", reason="the tinker package is not installed")

from tinker import types

from ownloop_server.gateway import SESSION_S, ClientSession, Gateway
from plugins.server.tests.toy_model import ToyGenerator, ToyHost

pytestmark = pytest.mark.virtual


class StubbornGenerator(ToyGenerator):
    """Cannot forget a policy."""

    num_asked = 0

    async def drop_policy(self, policy: Any) -> None:
        self.num_asked += 1
        raise ValueError("no replica has it")


async def begin_session(gateway: Gateway) -> ClientSession:
    """One with a training client, a version of it in the generator, and its sampling client."""
    session = gateway.open_session(types.CreateSessionRequest(tags=[], user_metadata=None, sdk_version="0.38.0"))
    created = await gateway.create(
        types.CreateModelRequest(session_id=session.id, model_seq_id=0, base_model="toy")
    ).wait(20)
    request = types.SaveWeightsForSamplerRequest(
        model_id=f"{session.id}:train:0", seq_id=1, sampling_session_seq_id=0, ttl_seconds=None
    )
    saved = await gateway.submit(
        request, lambda client: client.sampling_client(request, session.id, gateway.samplers)
    ).wait(20)
    for answer in (created, saved):
        assert answer is not None
        assert b"error" not in answer.content
    return session


async def test_one_that_fails_to_end_does_not_keep_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    host = ToyHost()
    host.generator = generator = StubbornGenerator(host)
    gateway = Gateway([host.served(tmp_path / "recovery")], tmp_path)
    async with gateway.running():
        for num_ended in (1, 2):
            session = await begin_session(gateway)
            await asyncio.sleep(SESSION_S / 2)
            assert gateway.session(session.id) is session  # a heartbeat
            await asyncio.sleep(SESSION_S * 0.9)
            assert gateway.training
            await asyncio.sleep(SESSION_S * 0.2)
            assert (gateway.sessions, gateway.training, generator.num_asked) == ({}, {}, num_ended)
    assert capfd.readouterr().err.count("ValueError: no replica has it") >= 2
