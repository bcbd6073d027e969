"""Requests that cannot begin, are cancelled, or whose client or session has ended: nothing goes on for nobody."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker", reason="the package tinker, of the extra tinker, is not installed")

from tinker import types

from generator.openai_calls import OpenAICall, OpenAIReply
from ownloop_server.answers import PendingAnswer
from ownloop_server.app import make_app
from ownloop_server.config import Limits
from ownloop_server.gateway import ClientSession, Gateway
from ownloop_server.keys import Keys
from plugins.server.tests.toy_model import ToyGenerator, ToyHost
from rl.types import Completion
from tests.waiting import run_virtual

pytestmark = pytest.mark.virtual


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


def make_gateway(folder: Path) -> tuple[Gateway, EndlessGenerator, ClientSession]:
    host = ToyHost()
    host.generator = generator = EndlessGenerator(host)
    gateway = Gateway([host.served(folder / "recovery")], folder)
    request = types.CreateSessionRequest(tags=[], user_metadata=None, sdk_version="0.38.0")
    return gateway, generator, gateway.open_session(request)


async def begin_samples(gateway: Gateway, session: ClientSession, num: int) -> list[PendingAnswer]:
    request = types.CreateSamplingSessionRequest(
        session_id=session.id, sampling_session_seq_id=len(gateway.samplers), base_model="toy"
    )
    sampler, prompt = await gateway.create_sampler(request), types.ModelInput.from_ints([2, 3])
    params = types.SamplingParams(max_tokens=3)
    begun = [
        gateway.sample(
            types.SampleRequest(sampling_session_id=sampler.id, seq_id=i, prompt=prompt, sampling_params=params)
        )
        for i in range(num)
    ]
    await asyncio.sleep(0.01)  # of the virtual clock: all of them run
    return begun


@pytest.mark.parametrize("call", ["run", "save"])
async def test_a_client_that_the_database_refused_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(_: object) -> None:
        raise OSError("database or disk is full")

    gateway, _, session = make_gateway(tmp_path)
    source = types.CreateModelRequest(session_id=session.id, model_seq_id=0, base_model="toy")
    await gateway.create(source).wait(20)
    name = types.SaveWeightsRequest(model_id=f"{session.id}:train:0", seq_id=1, path="one")
    saved = await gateway.submit(name, lambda client: client.save("weights", name)).wait(20)
    assert saved is not None
    path = json.loads(saved.content)["path"]
    request = types.LoadWeightsRequest(session_id=session.id, model_seq_id=1, path=path, optimizer=False)
    with monkeypatch.context() as patch:
        patch.setattr(gateway.database, call, fail)
        with pytest.raises(OSError, match="disk is full"):
            gateway.create_from(request)
    assert gateway.answers.num_waiting == 0
    result = await gateway.create_from(request).wait(20)
    assert result is not None
    assert b"error" not in result.content
    await gateway.close()


async def test_a_cancelled_sample_has_a_result_and_others_go_on(tmp_path: Path) -> None:
    gateway, generator, session = make_gateway(tmp_path)
    first, second = await begin_samples(gateway, session, 2)
    gateway.samplers.cancel(first.id)
    result = await first.wait(20)
    assert result is not None
    assert b"the request was cancelled" in result.content
    assert (gateway.answers.num_waiting, generator.num_running, second.done) == (1, 1, False)
    gateway.samplers.cancel(first.id)  # a client may repeat it
    await gateway.close()
    assert generator.num_running == 0


async def test_the_end_of_a_session_ends_its_samples_alone(tmp_path: Path) -> None:
    gateway, generator, session = make_gateway(tmp_path)
    request = types.CreateSessionRequest(tags=[], user_metadata=None, sdk_version="0.38.0")
    other = gateway.open_session(request)
    await begin_samples(gateway, session, 100)
    (kept,) = await begin_samples(gateway, other, 1)
    assert generator.num_running == 101
    await gateway.end_session(session.id)
    assert (generator.num_running, len(gateway.answers), kept.done) == (1, 1, False)
    await gateway.close()


def test_requests_of_a_client_that_disconnects_are_aborted(tmp_path: Path) -> None:
    async def body() -> None:
        sampling, ended = asyncio.Event(), asyncio.Event()

        async def openai(call: OpenAICall) -> OpenAIReply:
            del call
            sampling.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            raise AssertionError("for ever")

        model = replace(ToyHost().served(tmp_path / "recovery"), openai=openai)
        app = make_app(Gateway([model], tmp_path), Keys(tmp_path), Limits())
        request = json.dumps({"model": "toy", "prompt": [2, 3]}).encode()
        messages = [{"type": "http.request", "body": request, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await sampling.wait()
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None:
            assert ended.is_set()

        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"}
        path = {"path": "/oai/api/v1/completions", "raw_path": b"", "query_string": b"", "root_path": ""}
        await app({**scope, **path, "headers": [(b"host", b"127.0.0.1")], "server": ("127.0.0.1", 1)}, receive, send)
        assert ended.is_set()

    run_virtual(body())
