"""An agent in a process of its own that works for long: it answers meanwhile, and leaves nothing behind."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from monarch.actor import this_host

from controller.processes.mesh import ignore_unhandled_faults
from ownloop_hosts.connections import Lifeline
from ownloop_hosts.host_agent import HostAgent
from ownloop_hosts.model_copies import ModelOffer
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.e2e

HERE = "127.0.0.1"


@asynccontextmanager
async def running_agent(tmp_path: Path) -> AsyncGenerator[Any]:
    ignore_unhandled_faults(tmp_path / "controller.log")
    procs: Any = this_host().spawn_procs(per_host={"gpus": 1}, name="agent")
    try:
        async with asyncio.timeout(LIMIT_S):
            yield procs.spawn("agent", HostAgent, "a controller of this test", 20.0)
    finally:
        with contextlib.suppress(Exception):  # it may have ended
            await procs.stop()


@contextlib.asynccontextmanager
async def receiving(agent: Any, model: Path) -> AsyncGenerator["asyncio.Future[None]"]:
    """The agent fetches a model from a server that has accepted its connection and sends nothing."""
    with socket.create_server((HERE, 0)) as server:
        offer = ModelOffer(model, 10, HERE, server.getsockname()[1], bytes(32))
        receiving = asyncio.ensure_future(_awaited(agent.receive_model.call_one(offer)))
        with (await asyncio.to_thread(server.accept))[0]:
            yield receiving
        await asyncio.gather(receiving, return_exceptions=True)


async def _awaited(call: Any) -> None:
    await call


def test_an_agent_that_works_on_a_question_gives_signs_of_life(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    async def main() -> None:
        async with running_agent(tmp_path) as agent:
            await agent.beat.call_one({})
            question = agent.ask.call_one(Path.read_bytes, fifo)  # until somebody writes
            for call in (agent.beat.call_one({}), agent.kill.call_one("toy"), agent.ended.call_one("toy", 1.0)):
                await call
            assert await agent.stacks.call_one("toy", [0]) == {}
            later = agent.ask.call_one(Path.exists, fifo)
            await asyncio.to_thread(fifo.write_bytes, b"the end")
            assert await question == b"the end"
            assert await later

    asyncio.run(main())


def test_a_host_agent_receives_models_and_keeps_whole_ones_alone(tmp_path: Path) -> None:
    folder, lifeline = tmp_path / "models", Lifeline(HERE)

    async def main() -> None:
        async with running_agent(tmp_path) as agent:
            await agent.hold.call_one(lifeline.end)
            async with receiving(agent, folder / "model") as received:
                await agent.beat.call_one({})
                assert await agent.ask.call_one(Path.is_dir, folder)
                assert [path.name[:7] for path in folder.iterdir()] == [".model-"]
                assert not received.done()
                lifeline.cut()
                # It is empty then, so it goes with what was in it.
                await until(lambda: not folder.exists(), "the end of a folder with a model that is not whole")

    asyncio.run(main())
