"""The HTTP routes of Tinker's protocol (SDK 0.38). They translate; what happens is in `Gateway`.

A mistake in a call that has a sequence number is answered through its future, because the client counts on: an HTTP
error there would leave a gap that later calls wait for.
"""

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from tinker import types

from ownloop_server.access import Access, Caller, Door, check_owner
from ownloop_server.answers import PendingAnswer, ResponseBody
from ownloop_server.config import Limits
from ownloop_server.gateway import Gateway
from ownloop_server.keys import Keys
from ownloop_server.listing import Signatures, downloads, listing
from ownloop_server.openai_routes import openai_routes
from ownloop_server.sampling_clients import MAX_SAMPLES
from ownloop_server.status import add_monitoring, status_routes
from ownloop_server.training_client import TrainingClient
from ownloop_server.wire import check_size, decode_request

POLL_S = 25.0
"""How long a request for a result waits for it. The client gives up after 45 s."""
OLDEST_SDK = (0, 38)
TESTED_SDK = "0.38"


def make_app(
    gateway: Gateway, keys: Keys, limits: Limits, *, needs_key: bool = False, poll_s: float = POLL_S
) -> FastAPI:
    """The application. Ending it ends the gateway's sessions. With `needs_key`, every request has to have one."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        del app
        async with gateway.running():
            yield

    app = FastAPI(title="ownloop", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.gateway, app.state.poll_s, app.state.limits = gateway, poll_s, limits
    app.state.signatures = Signatures()
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ValueError, _mistake)
    app.add_exception_handler(404, _unknown)
    app.add_exception_handler(405, _unknown)
    for method, path, route in _ROUTES:
        app.add_api_route(f"/api/v1/{path}", route, methods=[method], response_model=None)
    app.include_router(listing, prefix="/api/v1")
    app.include_router(downloads, prefix="/api/v1")
    app.include_router(openai_routes)
    app.include_router(status_routes)
    app.add_middleware(Access, keys=keys, needs_key=needs_key, limits=limits)
    add_monitoring(app, gateway)  # added last, so it is outermost, and counts refused requests too
    return app


class CancelledRequest(BaseModel):
    """The body of `cancel_future`."""

    request_id: str


class InvalidCall(BaseModel):
    """A call of a training client that has a number and makes no sense."""

    model_id: str
    seq_id: int
    mistake: str


async def client_config(request: Request) -> dict[str, object]:
    """Flags of the SDK: larger requests, so that one logical batch stays together, and losses that run here."""
    limits: Limits = request.app.state.limits
    return {
        "fwdbwd_max_chunk_bytes_count": limits.body_bytes // 4,
        "proto_compress_fwdbwd": False,
        "custom_loss_server_side": True,  # else the SDK would compute a custom loss itself, in two passes
    }


async def dynamic_config() -> dict[str, object]:
    """No flags."""
    return {}


async def telemetry() -> dict[str, str]:
    """Accepts what the SDK reports and drops it."""
    return {"status": "accepted"}


async def create_session(body: types.CreateSessionRequest, door: Door, user: Caller) -> types.CreateSessionResponse:
    """A new session."""
    # letters in a version are left out: "0.38.0rc1"
    version = tuple(int(part) for part in body.sdk_version.split(".")[:2] if part.isdigit())
    if version < OLDEST_SDK:
        raise HTTPException(400, f"tinker {body.sdk_version} is too old; this server needs tinker>={TESTED_SDK}")
    warning = None
    if version > OLDEST_SDK:
        warning = f"this server was tested with tinker {TESTED_SDK}, and the client is {body.sdk_version}"
    session = door.open_session(body, user.name)
    return types.CreateSessionResponse(session_id=session.id, warning_message=warning)


async def heartbeat(body: types.SessionHeartbeatRequest, door: Door) -> types.SessionHeartbeatResponse:
    """Keeps a session."""
    door.session(body.session_id)
    return types.SessionHeartbeatResponse()


async def finish_session(session_id: str, door: Door) -> dict[str, object]:
    """Ends a session."""
    await door.end_session(session_id)
    return {}


async def create_model(body: types.CreateModelRequest, door: Door) -> dict[str, object]:
    """A training client of a new adapter."""
    # the numbers make a repeated request the same request
    return _accepted(door.create(body), f"{body.session_id}:train:{body.model_seq_id}")


async def load_weights(body: types.LoadWeightsRequest, door: Door) -> dict[str, object]:
    """A training client of a checkpoint, or a checkpoint into a training client."""
    if body.session_id is not None and body.model_seq_id is not None:
        return _accepted(door.create_from(body), f"{body.session_id}:train:{body.model_seq_id}")
    if body.model_id is None:
        raise HTTPException(422, "load_weights needs model_id and seq_id, or session_id and model_seq_id")
    pending = door.submit(body, lambda client: client.load(body.path, optimizer=body.optimizer))
    return _accepted(pending, body.model_id)


async def get_info(body: types.GetInfoRequest, door: Door) -> types.GetInfoResponse:
    """What a training client trains."""
    return door.training_client(body.model_id).describe()


async def forward_backward(request: Request, door: Door, user: Caller) -> dict[str, object]:
    """A protobuf message: loss and gradient, or the loss alone."""
    limits: Limits = request.app.state.limits
    body = decode_request(await request.body(), request.headers.get("content-encoding"), limits.body_bytes)
    check_owner(door, user, body.model_id)

    async def call(client: TrainingClient) -> ResponseBody:  # checked in its turn: its error belongs to this number
        check_size(body, limits)
        return await client.forward_backward(body, door.session(body.model_id.partition(":")[0]).losses)

    return _accepted(door.submit(body, call), body.model_id)


async def optim_step(body: types.OptimStepRequest, door: Door) -> dict[str, object]:
    """An optimizer step."""
    pending = door.submit(body, lambda client: client.optim_step(body.optim_params))
    return _accepted(pending, body.model_id)


async def save_weights(body: types.SaveWeightsRequest, door: Door) -> dict[str, object]:
    """A checkpoint to train on from."""
    return _accepted(door.submit(body, lambda client: client.save("weights", body)), body.model_id)


async def save_weights_for_sampler(body: types.SaveWeightsForSamplerRequest, door: Door) -> dict[str, object]:
    """A checkpoint to sample from, or without a path a sampling client."""
    session_id = body.model_id.partition(":")[0]

    async def call(client: Any) -> ResponseBody:
        if body.path is not None:
            return await client.save("sampler_weights", body)
        return await client.sampling_client(body, session_id, door.samplers)

    return _accepted(door.submit(body, call), body.model_id)


async def save_weights_external(body: types.SaveWeightsExternalRequest, door: Door) -> dict[str, object]:
    """A checkpoint to download."""
    return _accepted(door.submit(body, lambda client: client.export(body)), body.model_id)


async def create_custom_loss(body: types.CreateCustomLossRequest, door: Door) -> dict[str, object]:
    """A loss of the client's own, as a graph."""
    return _accepted(door.create_loss(body), body.session_id)


async def create_sampling_session(
    body: types.CreateSamplingSessionRequest, door: Door
) -> types.CreateSamplingSessionResponse:
    """A sampling client."""
    sampler = await door.create_sampler(body)
    return types.CreateSamplingSessionResponse(sampling_session_id=sampler.id)


async def asample(body: types.SampleRequest, door: Door) -> dict[str, object]:
    """Begins to sample."""
    pending = door.sample(body)
    # the SDK shows them; it asks for results by `request_id` alone
    ids = [f"{body.sampling_session_id}/{body.seq_id}/{index}" for index in range(min(body.num_samples, MAX_SAMPLES))]
    return {"request_id": pending.id, "sample_sequence_ids": ids}


async def cancel_future(body: CancelledRequest, door: Door) -> dict[str, object]:
    """Stops to sample for a request whose client has given up."""
    door.samplers.cancel(body.request_id)
    return {}


async def retrieve_future(body: types.FutureRetrieveRequest, request: Request, door: Door) -> Response:
    """The result of a request, or 408 if it is not there yet: the client then asks again at once."""
    pending = door.answers.find(body.request_id)
    if pending is None:
        # at 410 the SDK gives up
        raise HTTPException(410, f"request {body.request_id} is not known; its session has ended")
    answer = await pending.wait(request.app.state.poll_s)
    if answer is None:
        return JSONResponse({"type": "try_again", "request_id": body.request_id, "queue_state": "active"}, 408)
    return Response(answer.content, media_type=answer.media_type)


def _accepted(pending: PendingAnswer, model_id: str) -> dict[str, object]:
    return {"request_id": pending.id, "model_id": model_id}


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    """422, or the error as the result of a call that has a number: the calls after it wait for that number."""
    assert isinstance(error, RequestValidationError)
    found = "; ".join(f"{'.'.join(map(str, item['loc'][1:]))}: {_reason(item)}" for item in error.errors()[:3])
    mistake = f"the request is not valid: {found}"
    gateway, user, body = request.app.state.gateway, request.state.user, error.body
    named = {name: body.get(name) for name in ("model_id", "seq_id")} if isinstance(body, dict) else {}
    match named:  # the call has a number, so its error must take its place
        case {"model_id": str() as model_id, "seq_id": int() as number}:
            with contextlib.suppress(HTTPException):  # there is no such client
                check_owner(gateway, user, model_id)
                call = InvalidCall(model_id=model_id, seq_id=number, mistake=mistake)
                return JSONResponse(_accepted(gateway.submit(call, _fail(mistake)), model_id))
        case _:
            pass
    return JSONResponse({"detail": mistake}, 422)


def _reason(found: Mapping[str, object]) -> str:
    if found["type"] == "float_type" and found.get("input") is None:
        return f"{found['msg']}, and is null, as the SDK sends NaN and infinity"
    return str(found["msg"])


def _fail(mistake: str) -> Callable[[TrainingClient], Awaitable[ResponseBody]]:
    async def call(client: TrainingClient) -> ResponseBody:
        del client
        raise ValueError(mistake)

    return call


async def _mistake(request: Request, error: Exception) -> JSONResponse:
    del request
    return JSONResponse({"detail": str(error)}, 422)


async def _unknown(request: Request, error: Exception) -> JSONResponse:
    detail = getattr(error, "detail", None)
    if detail in (None, "Not Found", "Method Not Allowed"):  # FastAPI's own words, which name no address
        detail = (
            f"{request.method} {request.scope['path']} is not supported by this server; its documentation lists what is"
        )
    return JSONResponse({"detail": detail}, 404)


_ROUTES = (
    ("POST", "client/config", client_config),
    ("POST", "client/dynamic_config", dynamic_config),
    ("POST", "telemetry", telemetry),
    ("POST", "create_session", create_session),
    ("POST", "session_heartbeat", heartbeat),
    ("POST", "sessions/{session_id}/finish", finish_session),
    ("POST", "create_model", create_model),
    ("POST", "load_weights", load_weights),
    ("POST", "get_info", get_info),
    ("POST", "forward_backward", forward_backward),
    ("POST", "optim_step", optim_step),
    ("POST", "save_weights", save_weights),
    ("POST", "save_weights_for_sampler", save_weights_for_sampler),
    ("POST", "save_weights_external", save_weights_external),
    ("POST", "create_custom_loss", create_custom_loss),
    ("POST", "create_sampling_session", create_sampling_session),
    ("POST", "asample", asample),
    ("POST", "retrieve_future", retrieve_future),
    ("POST", "cancel_future", cancel_future),
)
