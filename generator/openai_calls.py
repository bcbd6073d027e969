"""Requests in OpenAI's form: a call on its way to a generator's process, and the calls that the process is answering.

A caller in another process begins a request, and asks for the events of a stream one by one. The controller imports
this module, so it does not import vLLM.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl.checks import unknown_name
from rl.lora import Policy
from rl.system.hardware import import_and_freeze
from rl.system.plugins import find

if TYPE_CHECKING:  # the import would load vLLM
    from generator.engine import GenerationEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAICall:
    """One request."""

    kind: str
    """Whose request it is: "chat" or "completions"; `serving` may know more kinds."""
    body: bytes
    """The JSON that the client sent. What its `model` says does not count here."""
    policy: Policy
    """What to sample from."""
    model: str
    """The model's name in answers."""
    tool_parser: str = ""
    """The name of vLLM's parser that finds tool calls in the text; empty for none."""
    reasoning_parser: str = ""
    """The name of vLLM's parser that separates reasoning from the answer; empty for none."""
    serving: str = "openai"
    """The entry point in `ownloop.generators` of the `Serving` that answers."""
    extra: Any = None
    """What that class needs besides the body. It must be picklable."""
    begins_with: tuple[int, ...] = ()
    """Tokens that the prompt begins with, if they are known. A router sends it where they were computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIReply:
    """The answer to a request."""

    status: int
    """The status code of HTTP."""
    body: str | AsyncGenerator[str]
    """JSON; or, if the client asked for a stream, the events of `text/event-stream` as they come."""


class Serving(ABC):
    """Answers requests over an engine, with one choice of parsers. An entry point of `ownloop.generators` names it.

    The entry point's name is what `OpenAICall.serving` says.
    """

    @abstractmethod
    def __init__(self, engine: "GenerationEngine", *, tool_parser: str, reasoning_parser: str) -> None:
        """Raises ValueError for a parser that vLLM cannot use with this model, and for a model without tokenizer."""

    @abstractmethod
    async def answer(self, call: OpenAICall) -> tuple[int, str | AsyncGenerator[str]]:
        """The status, and JSON or the events of a stream."""


class OpenAIRequests:
    """The requests that one generator process is answering. Lives on the actor's event loop."""

    def __init__(self, engine: "GenerationEngine") -> None:
        """vLLM's serving code is loaded by the first request."""
        self._engine = engine
        self._building = asyncio.Lock()
        self._serving: dict[tuple[str, ...], Serving] = {}
        self._running: dict[str, asyncio.Task[tuple[int, str | AsyncGenerator[str]]]] = {}
        self._events: dict[str, AsyncGenerator[str]] = {}
        self._taking: dict[str, asyncio.Future[str | None]] = {}

    async def begin(self, call_id: str, call: OpenAICall) -> tuple[int, str | None]:
        """Status and JSON of the answer; None in the place of JSON if the answer is a stream.

        Raises ValueError for a parser that vLLM does not have, and for a model without tokenizer.
        """

        async def answer() -> tuple[int, str | AsyncGenerator[str]]:
            serving = await self._serving_for(call.serving, call.tool_parser, call.reasoning_parser)
            return await serving.answer(call)

        self._running[call_id] = running = asyncio.create_task(answer())
        try:
            status, body = await running
        except asyncio.CancelledError:
            raise RuntimeError("the call was cancelled") from None
        finally:
            del self._running[call_id]
        if isinstance(body, str):
            return status, body
        self._events[call_id] = body
        return status, None

    async def next_event(self, call_id: str) -> str | None:
        """The next event of a stream; None after the last, or if it was cancelled."""
        if call_id not in self._events:
            return None
        self._taking[call_id] = taking = asyncio.ensure_future(anext(self._events[call_id], None))
        try:
            event = await taking
        except asyncio.CancelledError:
            event = None
        finally:
            del self._taking[call_id]
        if event is None:
            self._events.pop(call_id, None)
        return event

    def cancel(self, call_id: str) -> None:
        """Ends a request, if it is there."""
        for tasks in (self._running, self._taking):
            if call_id in tasks:
                tasks[call_id].cancel()
        if (events := self._events.pop(call_id, None)) is not None and call_id not in self._taking:
            closing = asyncio.ensure_future(events.aclose())
            closing.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _serving_for(self, *names: str) -> Serving:
        def build() -> Serving:
            name, tool_parser, reasoning_parser = names
            import_and_freeze("vllm.entrypoints.openai.chat_completion.serving")
            found = find("generators", name, type[Serving])
            if found is None:
                raise unknown_name("OpenAICall.serving", name, (), "generators")
            return found(self._engine, tool_parser=tool_parser, reasoning_parser=reasoning_parser)

        async with self._building:
            if names not in self._serving:
                self._serving[names] = await asyncio.to_thread(build)
            return self._serving[names]
