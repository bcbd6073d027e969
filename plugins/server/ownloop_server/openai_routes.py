"""OpenAI's endpoints at `/oai/api/v1`: what clients train or have saved, for any program that knows these endpoints.

`model` names what to sample from: a base model, a training client by its run id (its weights as they are now), a
sampling client by its id, or a checkpoint by its `tinker://` path. vLLM's own serving code does the rest.
"""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from controller.processes.errors import MeshError
from generator.openai_calls import OpenAICall, OpenAIReply
from ownloop_server.access import Caller, Door, check_owner
from ownloop_server.archive import EXPORTED
from ownloop_server.gateway import Gateway
from ownloop_server.keys import User
from ownloop_server.sampling_clients import MAX_SAMPLES
from ownloop_server.served_models import ServedModel
from ownloop_server.web import first_or_gone
from rl.lora import Policy

PREFIX = "/oai/api/v1"
openai_routes = APIRouter(prefix=PREFIX)


@openai_routes.get("/models")
async def models(door: Door, user: Caller) -> dict[str, Any]:
    """The base models, the user's training clients and the checkpoints to sample from."""
    seen_by = None if user.is_operator else user.name
    runs = [run.id for run in door.database.runs(seen_by) if run.id in door.training]
    paths = [row.path for row in door.database.checkpoints(user=seen_by) if f"/{EXPORTED}/" not in row.path]
    return {"object": "list", "data": [_card(name) for name in (*door.models.names, *runs, *paths)]}


@openai_routes.get("/models/{name:path}")
async def model(name: str, door: Door, user: Caller) -> Response:
    """One of them: what can be named in a request."""
    check_owner(door, user, name)
    if _card(name) not in (await models(door, user))["data"] and door.samplers.find(name) is None:
        return failure(404, f"there is no model {name}; GET models lists what there is")
    return JSONResponse(_card(name))


def _card(name: str) -> dict[str, str]:
    return {"id": name, "object": "model", "owned_by": "ownloop"}


@openai_routes.post("/chat/completions")
async def chat_completions(request: Request, door: Door, user: Caller) -> Response:
    """A chat, in the model's own chat template."""
    return await _answer("chat", request, door, user)


@openai_routes.post("/completions")
async def completions(request: Request, door: Door, user: Caller) -> Response:
    """A text that the model continues."""
    return await _answer("completions", request, door, user)


async def _answer(kind: str, request: Request, gateway: Gateway, user: User) -> Response:
    try:
        name = _check(await _json(request))
        check_owner(gateway, user, name)
        model, policy = await gateway.find_policy(name)
    except ValueError as error:
        return failure(400, str(error))
    except HTTPException as error:
        return failure(error.status_code, error.detail)
    call = OpenAICall(kind=kind, body=await request.body(), policy=policy, model=name)
    answering = _sample(model, policy, call)
    try:
        reply = await first_or_gone(answering, request)
    except ValueError as error:
        return failure(400, str(error))
    except MeshError as error:
        return failure(503, str(error))
    if reply is None:
        return failure(499, "the client has gone")  # this is not read
    assert isinstance(reply, OpenAIReply)
    if not isinstance(reply.body, str):
        return StreamingResponse(_events(answering), reply.status, media_type="text/event-stream")
    await answering.aclose()  # gives the policy back before the answer is sent
    model.throughput.add("sampled", json.loads(reply.body).get("usage", {}).get("completion_tokens", 0))
    return Response(reply.body, reply.status, media_type="application/json")


async def _sample(model: ServedModel, policy: Policy, call: OpenAICall) -> AsyncGenerator[OpenAIReply | str]:
    """Yields the reply, and then the events of its stream. The policy is kept until the end."""
    if model.openai is None:
        raise ValueError(f"{model.names[0]} is not served at OpenAI's endpoints")
    async with model.snapshots.use(policy):
        reply = await model.openai(call)
        yield reply
        if not isinstance(reply.body, str):
            async with aclosing(reply.body) as events:
                async for event in events:
                    model.throughput.add("sampled", 1)  # vLLM sends an event per token
                    yield event


async def _events(answering: AsyncGenerator[OpenAIReply | str]) -> AsyncGenerator[str]:
    """The events of a stream. An error in the middle is the last one."""
    try:
        async with aclosing(answering) as events:
            async for event in events:
                assert isinstance(event, str)
                yield event
    except (ValueError, MeshError) as error:
        yield f"data: {json.dumps(_error(503, str(error)))}\n\n"  # the status has been sent, so an event must say it


async def _json(request: Request) -> Any:
    try:
        return await request.json()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from None


def _check(body: object) -> str:
    """The name of the model. Raises ValueError for a body that makes no sense, or asks for too much."""
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        raise ValueError("model is missing; GET models lists what there is")
    prompt, n = body.get("prompt"), body.get("n") or 1
    num_prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    if not isinstance(n, int) or not 1 <= n * num_prompts <= MAX_SAMPLES:
        raise ValueError(f"n is {n}, for {num_prompts} prompts; together they must be from 1 to {MAX_SAMPLES} samples")
    return body["model"]


def failure(status: int, message: str) -> JSONResponse:
    """An error in OpenAI's form."""
    return JSONResponse(_error(status, message), status)


def _error(status: int, message: str) -> dict[str, object]:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "server_error"}
    return {"error": {"message": message, "type": kinds.get(status, "invalid_request_error"), "code": status}}
