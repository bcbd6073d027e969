"""The endpoint that programs talk to: OpenAI's chat completions and Responses, and Anthropic's messages.

    program ---HTTP, its session's key---> AgentEndpoint ---the earlier calls---> a generator (`capture.py`)
            <--answer, or events---------               <--record, answer-------

A session is open between `begin` and `end`. Its key is the API key that the program sends, a part of the path
(`/s/KEY/v1`), or the beginning of its header X-Session-ID, up to a dot. A request is answered under the session's
limits; when the session ends, its requests are cancelled and the key is refused. The endpoint keeps the calls of open
sessions; the generator keeps none.
"""

import asyncio
import contextlib
import json
import secrets
import socket
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from controller.handles.adapters import BoundGenerator
from controller.handles.generator_router import GeneratorRouter
from controller.processes.errors import MeshError
from generator.openai_calls import OpenAICall, OpenAIReply
from ownloop_agents.open_session import OpenSession, SessionEndedError, SessionLimits
from ownloop_agents.records import RECORD, SERVING, CallRecord, SessionRequest
from ownloop_agents.sessions import ModelCall
from ownloop_agents.splicing import whole_tokens
from ownloop_server.replica_calls import openai
from ownloop_server.web import MAX_JSON_VALUES, Server, first_or_gone, has_too_many_values, listen
from rl.lora import Policy
from rl.protocols import Generator
from rl.rollouts.episodes import check_sampled_distribution
from rl.sampling import KeptSets
from rl.types import Completion, SamplingParams, Turn

DIALECTS = ("chat/completions", "responses", "messages", "messages/count_tokens")
_LABELS = ("x-claude-code-agent-id", "x-session-id")
_LAST_EVENTS = ("data: [DONE]", "event: response.completed", "event: message_stop")
_BACKLOG = 2048
# fields that change from run to run and not what is asked
_IDS = ("id", "tool_call_id", "call_id", "tool_use_id", "metadata", "user", "prompt_cache_key")
T = TypeVar("T")
Ask = Callable[[OpenAICall], Awaitable[OpenAIReply]]


class AgentEndpoint:
    """Answers the requests of open sessions. Use `agent_endpoint`."""

    def __init__(
        self, ask: Ask, policy: Policy, sampling: SamplingParams, limits: SessionLimits, options: Mapping[str, str]
    ) -> None:
        """`ask` is a generator's; `options` are fields of `OpenAICall`."""
        self.sampling, self.limits = sampling, limits
        self.url = ""
        """Where programs of this host find it, without `/v1`."""
        self.socket: Path | None = None
        """A Unix socket with the same endpoint, for sandboxes without a network."""
        self.sessions: dict[str, OpenSession] = {}
        """The open sessions by their keys."""
        self._ask, self._policy, self._options = ask, policy, options

    def begin(self, session_id: str, *, sampling: SamplingParams | None = None) -> OpenSession:
        """Opens a session with a key of its own. `sampling` replaces the endpoint's for this session."""
        # 144 random bits: a program cannot guess another's key
        session = OpenSession(session_id, secrets.token_urlsafe(24), sampling or self.sampling, self.limits)
        self.sessions[session.key] = session
        return session

    async def end(self, session: OpenSession) -> None:
        """Refuses the session's key from now on, and cancels its requests. May be called again."""
        self.sessions.pop(session.key, None)  # first, so that no further request is accepted
        await session.end()

    async def handle(self, request: Request) -> Response:
        """Answers one HTTP request."""
        path = str(request.scope["path"]).strip("/")  # `request.url` is made of the Host header, too
        keys = _keys(request)
        if path.startswith("s/"):
            _, key, path = (*path.split("/", 2), "")[:3]  # for programs that set no header
            keys = [key, *keys[-1:]]
        dialect = path.removeprefix("v1/")
        session = next((self.sessions[key] for key in keys if key in self.sessions), None)
        if session is None:
            return failure(dialect, 401, "the API key is of no open session; a program uses the key that it was given")
        if request.method in ("GET", "HEAD"):
            return _listing(dialect)
        if dialect not in DIALECTS:
            return failure(dialect, 404, f"{request.scope['path']} is not served; there are {', '.join(DIALECTS)}")
        session.last_request = time.monotonic()  # also a request that is refused counts as a sign of life
        try:
            # ends with the session, also while the client still sends
            body = await session.while_open(_body(request, session.limits.max_body_bytes))
            return await self._answer(session, dialect, body, request)
        except SessionEndedError:
            return failure(dialect, 401, "the session has ended")
        except ValueError as error:
            return failure(dialect, 400, str(error))
        except MeshError as error:
            return failure(dialect, 503, str(error))

    async def _answer(self, session: OpenSession, dialect: str, body: bytes, request: Request) -> Response:
        text, name = _read(body)
        repeat = session.texts[text]  # a repeated text gets another seed
        session.texts[text] += 1
        await session.while_open(session.places.acquire())
        with contextlib.ExitStack() as place:
            place.callback(session.places.release)
            call = replace(self._call(session, dialect, body, repeat), model=name)
            answering = self._sample(session, call, text, _label(request))
            session.answering.add(answering)  # `end` closes it for a client that has stopped reading
            place.callback(session.answering.discard, answering)
            reply = await first_or_gone(answering, request)
            if reply is None:
                return failure(dialect, 499, "the client has gone")  # this is not read
            assert isinstance(reply, OpenAIReply)
            if isinstance(reply.body, str):
                return Response(_in_dialect(dialect, reply), reply.status, media_type="application/json")
            events = _events(answering, dialect, place.pop_all())  # the place is kept until the stream ends
            return StreamingResponse(events, reply.status, media_type="text/event-stream")

    def _call(self, session: OpenSession, dialect: str, body: bytes, repeat: int) -> OpenAICall:
        """The request for the generator. Raises ValueError if the session is at one of its limits."""
        limits, left = session.limits, session.limits.max_sampled_tokens - session.num_sampled
        if dialect != "messages/count_tokens":
            # counted as asked, so that parallel requests cannot pass the limit
            if session.num_asked >= limits.max_calls:
                session.ended_by = "call_limit"
                raise ValueError(f"the session has made {session.num_asked} calls; max_calls is {limits.max_calls}")
            if left <= 0:
                session.ended_by = "token_limit"
                raise ValueError(f"the session has sampled its max_sampled_tokens, {limits.max_sampled_tokens}")
            session.num_asked += 1
        # a call never samples more than the session has left
        sampling = replace(session.sampling, max_tokens=min(session.sampling.max_tokens, max(left, 1)))
        return OpenAICall(
            kind=dialect,
            body=body,
            policy=self._policy,
            model="policy",
            serving=SERVING,
            extra=SessionRequest(earlier=tuple(session.earlier), sampling=sampling, repeat=repeat),
            # so that the router sends it where these tokens are cached
            begins_with=tuple(whole_tokens(session.earlier, len(session.earlier) - 1)) if session.earlier else (),
            **self._options,
        )

    async def _sample(
        self, session: OpenSession, call: OpenAICall, text: int, label: str
    ) -> AsyncGenerator[OpenAIReply | str]:
        """Yields the reply, and then the events of its stream. Keeps the record, and whether all was delivered."""
        started = time.monotonic()
        with session.asking(text):
            reply = await session.while_open(self._ask(call))
            if isinstance(reply.body, str):
                record, _, body = reply.body.partition("\n")
                if record:
                    _keep(session, call, record, label, started)
                given_up = reply.status == 200 and not record and call.kind != "messages/count_tokens"
                session.answered(text, body if reply.status >= 500 else "vLLM gave it up" if given_up else "")
                yield replace(reply, body=body)
                return
            yield reply
            index, whole = None, False  # the record comes before the last event of the stream
            async with aclosing(reply.body) as events:
                try:
                    while (event := await session.while_open(anext(events, None))) is not None:
                        if event.startswith(RECORD):
                            index = _keep(session, call, event.removeprefix(RECORD), label, started)
                        else:
                            yield event
                            whole = whole or event.startswith(_LAST_EVENTS)  # and the program has taken it
                except BaseException:
                    if index is not None and not whole:
                        # the program may not have read it, so it is not trained
                        session.calls[index] = replace(session.calls[index], delivered=False)
                    raise
            session.answered(text, "" if index is not None else "a stream ended without its record")


@asynccontextmanager
async def agent_endpoint(
    generator: Generator,
    sampling: SamplingParams,
    limits: SessionLimits | None = None,
    *,
    tool_parser: str = "",
    reasoning_parser: str = "",
    host: str = "127.0.0.1",
    port: int = 0,
) -> AsyncGenerator[AgentEndpoint]:
    """Serves an endpoint over a generator that `launch` started, until the block is left.

    `sampling` replaces what programs ask for; its `max_tokens` limits one answer. The parsers are vLLM's, by its names:
    `tool_parser` finds tool calls in the text ("hermes", "qwen3_coder", ...). Other hosts reach it at `host`.

    Raises ValueError for sampling that the trainer cannot score, for another generator, and for a taken address.
    """
    check_sampled_distribution(sampling)
    policy: Policy = None
    inner: Any = generator
    if isinstance(inner, BoundGenerator):  # an adapter's generator: the policy goes with every call
        inner, policy = inner.unbound, inner.name
    ask: Ask | None = partial(openai, inner) if isinstance(inner, GeneratorRouter) else getattr(inner, "openai", None)
    if ask is None:  # checked here, so that a wrong generator is an error of this line
        raise ValueError(f"generator is a {type(inner).__name__}; an endpoint needs one that launch() started")
    options = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
    endpoint = AgentEndpoint(ask, policy, sampling, limits or SessionLimits(), options)
    app = FastAPI(openapi_url=None)
    app.add_api_route("/{path:path}", endpoint.handle, methods=["GET", "HEAD", "POST"])
    async with _serving(app, host, port) as (endpoint.url, endpoint.socket):
        try:
            yield endpoint
        finally:
            for session in [*endpoint.sessions.values()]:  # a list: ending a session changes the dictionary
                await endpoint.end(session)


@asynccontextmanager
async def _serving(app: FastAPI, host: str, port: int) -> AsyncGenerator[tuple[str, Path]]:
    """Serves within the block, at an address and at a Unix socket, which it gives."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ownloop-agents-")))
        folder.chmod(0o755)  # a sandbox is another user
        path = folder / "endpoint.sock"
        local = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        local.bind(str(path))
        path.chmod(0o666)  # any user may connect: the session's key decides
        listener = stack.enter_context(listen(host, port))
        for each in (local, listener):
            each.listen(_BACKLOG)  # so that a program may connect before uvicorn has started
        server = Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=75))
        running = asyncio.create_task(server.serve(sockets=[listener, local]))
        try:
            # 0.0.0.0 is no address to connect to
            yield f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{listener.getsockname()[1]}", path
        finally:
            server.should_exit = server.force_exit = True  # streams that are open end at once
            await running


def failure(dialect: str, status: int, message: str) -> JSONResponse:
    """An error in the dialect's form."""
    kinds = {401: "authentication_error", 404: "not_found_error", 503: "api_error"}
    error = {"message": message, "type": kinds.get(status, "invalid_request_error")}
    body = {"type": "error", "error": error} if dialect.startswith("messages") else {"error": {**error, "code": status}}
    return JSONResponse(body, status)


def _keep(session: OpenSession, call: OpenAICall, record: str, label: str, started: float) -> int:
    """Adds a finished call to its session. Returns its index."""
    read = CallRecord.from_json(record)
    completion = Completion(
        tokens=read.tokens,
        logprobs=read.logprobs,
        versions=read.versions,
        text=read.text,
        finish_reason=read.finish_reason,
        temperature=session.sampling.temperature,
        kept=None if read.kept is None else KeptSets.of(read.kept),
    )
    session.last_request = time.monotonic()  # for limits of idleness and for the report
    session.calls.append(
        ModelCall(
            turn=Turn(prompt_tokens=read.prompt_tokens, completion=completion, prompt=read.prompt),
            parent=read.parent,
            how=read.how,
            digest=read.digest,
            dialect=call.kind,
            label=label,
            constrained=read.constrained,
            seconds=session.last_request - started,
        )
    )
    session.earlier.append(session.calls[-1].as_earlier())  # only now: a later request may continue it
    return len(session.calls) - 1


async def _events(
    answering: AsyncGenerator[OpenAIReply | str], dialect: str, place: contextlib.ExitStack
) -> AsyncGenerator[str]:
    """The events of a stream. An error in the middle is the last one."""
    with place:  # gives the session's place back at the end
        try:
            async with aclosing(answering) as events:
                async for event in events:
                    assert isinstance(event, str)
                    yield event
        except (ValueError, MeshError, SessionEndedError) as error:
            body = bytes(failure(dialect, 503, str(error) or "the session has ended").body).decode()
            yield f"event: error\ndata: {body}\n\n"


def _in_dialect(dialect: str, reply: OpenAIReply) -> str:
    """vLLM's answer; its errors have OpenAI's form, which Anthropic's clients do not read."""
    assert isinstance(reply.body, str)
    if reply.status < 400 or not dialect.startswith("messages"):
        return reply.body
    return bytes(failure(dialect, reply.status, json.loads(reply.body)["error"]["message"]).body).decode()


def _listing(path: str) -> Response:
    """What programs look at before they ask: whether someone is there, and the names of models."""
    card = {"id": "policy", "object": "model", "owned_by": "ownloop"}
    if path == "models":
        return JSONResponse({"object": "list", "data": [card]})
    if path.startswith("models/"):  # a program's name for the model is free
        return JSONResponse({**card, "id": path.removeprefix("models/")})
    return Response(status_code=200 if path in ("", "v1") else 404)


async def _body(request: Request, most: int) -> bytes:
    """The body. Raises ValueError if it has more bytes than `most`, or too many values to be parsed soon."""
    parts, size = list[bytes](), 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > most:  # before more is read
            raise ValueError(f"the request has more than {most} bytes, which is max_body_bytes")
    body = b"".join(parts)
    if has_too_many_values(body):
        raise ValueError(f"the request has more than {MAX_JSON_VALUES} values in its JSON")
    return body


def _read(body: bytes) -> tuple[int, str]:
    """A hash of a request without its ids, which differ from run to run, and what it calls the model.

    Raises ValueError if it is not JSON.
    """
    try:
        read = json.loads(body)
        text = hash(json.dumps(_plain(read), sort_keys=True))  # sorted: the order of fields does not matter
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"the body is no JSON in UTF-8, uncompressed: {error}") from None
    name = read.get("model") if isinstance(read, dict) else None
    return text, name if isinstance(name, str) else "policy"


def _plain(value: object) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items() if name not in _IDS}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _keys(request: Request) -> list[str]:
    """What may be a session's key: of Anthropic's clients, of OpenAI's, and of frameworks that name a session."""
    sent = request.headers
    scheme, _, token = sent.get("authorization", "").strip().partition(" ")
    # of the last, the part before the dot is the key; `verifiers_worker` adds a number
    return [sent.get("x-api-key", "").strip(), token.strip() or scheme, sent.get("x-session-id", "").partition(".")[0]]


def _label(request: Request) -> str:
    return next((request.headers[name] for name in _LABELS if name in request.headers), "")
