"""Requests in OpenAI's form to a router: one replica answers each, another if that dies before it has begun."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from controller.handles.generator_handle import GeneratorHandle
from controller.handles.generator_router import GeneratorRouter
from controller.processes.errors import MeshError
from generator.openai_calls import OpenAICall, OpenAIReply


async def openai(router: GeneratorRouter, call: OpenAICall) -> OpenAIReply:
    """Answers a request on one replica; on another if that dies before it has answered or begun a stream.

    Raises as `GeneratorHandle.openai`. A stream whose replica dies raises `MeshError`: half of it cannot be taken back.
    """
    answering = _answer(router, call)
    try:
        first = await anext(answering)
    except MeshError:
        answering = _answer(router, call)
        first = await anext(answering)
    assert isinstance(first, OpenAIReply)
    if isinstance(first.body, str):
        await answering.aclose()
        return first
    return OpenAIReply(status=first.status, body=_events(answering))


async def _answer(router: GeneratorRouter, call: OpenAICall) -> AsyncGenerator[OpenAIReply | str]:
    """Yields the reply, and then the events of its stream. Its replica counts as busy until the end."""
    async with router.replica(call.begins_with, 1, call.policy) as replica:
        assert isinstance(replica.generator, GeneratorHandle)
        reply = await replica.generator.openai(call)
        yield reply
        if not isinstance(reply.body, str):
            async with aclosing(reply.body) as events:
                async for event in events:
                    yield event


async def _events(answering: AsyncGenerator[OpenAIReply | str]) -> AsyncGenerator[str]:
    async with aclosing(answering) as events:
        async for event in events:
            assert isinstance(event, str)
            yield event
