"""Who may send a request, how large and how often, and whose things it may name.

A server that listens beyond its own host asks every request for a key. Its user sees only what their own sessions made.
"""

import asyncio
import base64
import binascii
import contextlib
import re
import time
from typing import Annotated

from fastapi import Depends, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ownloop_server.config import Limits, is_this_host
from ownloop_server.gateway import Gateway
from ownloop_server.keys import EVERYONE, Keys, User
from ownloop_server.web import MAX_JSON_VALUES, PATIENCE_S, SLOWEST_BYTES_PER_S, has_too_many_values

OPEN_PATHS = ("/api/v1/healthz",)  # what load balancers ask before they know any user
"""What needs no key."""
DOWNLOADS = "/api/v1/downloads/"
"""What begins so needs no key either: the address itself is signed."""
TRAINING_PATH = "/api/v1/forward_backward"
"""Where a body is protobuf, and JSON everywhere else."""
PAGE_PATHS = ("/", "/status.json", "/metrics")
"""What a browser may show. It sends the key as the password of HTTP's basic authentication."""
_SILENCE_S = 0.5  # a client that sends slower than this has stopped
_IDS = ("session_id", "model_id", "run_id", "sampler_id", "sampling_session_id", "request_id")
_PATHS = ("path", "model_path", "tinker_path")


class Access:
    """An ASGI middleware: refuses requests before any route sees them, and notes the user of the others."""

    def __init__(self, app: ASGIApp, *, keys: Keys, needs_key: bool, limits: Limits) -> None:
        """Without `needs_key`, requests need no key, but must be for a name of this host."""
        self._app = app
        self._keys = keys
        self._needs_key = needs_key
        self._limits = limits
        self._rates: dict[str, _Rate] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with an error, or passes the request on."""
        if scope["type"] != "http":  # "lifespan" and websockets: only HTTP has users here
            await self._app(scope, receive, send)
            return
        try:
            scope.setdefault("state", {})["user"] = self._admit(Request(scope))
            body = await self._body(scope["path"], receive)
        except HTTPException as error:
            if error.status_code == 413:  # who is still sending when the connection closes never sees the answer
                await _discard(receive, 2 * self._limits.body_bytes)
            # Tinker's clients show `detail`, OpenAI's `error`.
            content = {"detail": error.detail, "error": {"message": error.detail, "code": error.status_code}}
            response = JSONResponse(content, error.status_code, headers=error.headers)
            await response(scope, receive, send)
            return
        given = False

        async def received() -> Message:
            nonlocal given
            if given:  # what follows is the end of the connection
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, received, send)

    async def _body(self, path: str, receive: Receive) -> bytes:
        """The whole body. Raises HTTPException for a body that is too large, and for one that stops coming."""
        body, more, loop = bytearray(), True, asyncio.get_running_loop()
        started = loop.time()
        while more:
            try:
                async with asyncio.timeout_at(started + PATIENCE_S + len(body) / SLOWEST_BYTES_PER_S):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body stopped coming after {len(body)} bytes") from None
            body += message.get("body", b"")
            more = message["type"] == "http.request" and message.get("more_body", False)
            if len(body) > self._limits.body_bytes:  # a body that did not announce its length
                raise self._too_large()
        if path != TRAINING_PATH and has_too_many_values(body):
            raise HTTPException(413, f"the body has more than {MAX_JSON_VALUES} values; send several requests")
        return bytes(body)

    def _admit(self, request: Request) -> User:
        """Raises HTTPException for a request that is refused."""
        user = self._user(request)
        if int(request.headers.get("content-length", 0)) > self._limits.body_bytes:
            raise self._too_large()
        # per user and not per address: users share gateways and notebooks
        rate = self._rates.setdefault(user.name, _Rate(self._limits.requests_per_s))
        if (wait_s := rate.wait_s()) > 0:
            raise HTTPException(
                429,
                f"more than {self._limits.requests_per_s:g} requests per second; `ownloop serve "
                "--limits.requests-per-s` sets the limit",
                {"Retry-After": f"{wait_s:.3f}"},  # the SDK waits so long and sends again
            )
        return user

    def _user(self, request: Request) -> User:
        path: str = request.scope["path"]  # what routes go by; `request.url` is made of the Host header, too
        if path in OPEN_PATHS or path.startswith(DOWNLOADS):
            return User(name="")
        self._needs_key = self._needs_key or self._keys.exist()  # the first one closes a server that runs
        if not self._needs_key:
            # A web page can point its own name at this address (DNS rebinding), and would then reach the server from
            # a browser. Where keys are needed, it has none.
            host = _host(request)
            if not is_this_host(host):
                raise HTTPException(
                    421, f"the request is for the host {host}; this server answers for 127.0.0.1 and localhost"
                )
            return EVERYONE
        user = self._keys.find(_key(request))
        if user is None:
            # a browser then asks its user for the key
            browser = {"WWW-Authenticate": 'Basic realm="ownloop: any name, and your key as the password"'}
            raise HTTPException(
                401,
                "this server needs a key that it knows, in X-API-Key or as a bearer token; its operator makes one with "
                "`ownloop key add NAME`",
                browser if path in PAGE_PATHS else None,
            )
        return user

    def _too_large(self) -> HTTPException:
        return HTTPException(
            413, f"the request is larger than {self._limits.body_bytes} bytes; send fewer datums at a time"
        )


async def _discard(receive: Receive, most_bytes: int) -> None:
    """Reads a request's body, or the first `most_bytes` of it, and forgets it. Stops when no more comes for a while."""
    received, more = 0, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while more and received < most_bytes:
                async with asyncio.timeout(_SILENCE_S):
                    message = await receive()
                received += len(message.get("body", b""))
                more = message["type"] == "http.request" and message.get("more_body", False)


class _Rate:
    """Allows so many requests per second; the requests of two seconds may come at once."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._left = 2 * per_s
        self._at = time.monotonic()

    def wait_s(self) -> float:
        """Counts a request. Returns 0, or how long it must wait."""
        now = time.monotonic()
        self._left = min(2 * self._per_s, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return (1 - self._left) / self._per_s
        self._left -= 1
        return 0.0


def _host(request: Request) -> str:
    """The host of the Host header, without its port; this host if there is none, which no browser leaves out."""
    named = ",".join(request.headers.getlist("host")) or "localhost"
    host = re.sub(r":\d*$", "", named)
    return host[1:-1] if host.startswith("[") else host


def _key(request: Request) -> str:
    if key := request.headers.get("x-api-key"):
        return key
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    # A browser adds a password to requests that other pages make it send, so that one counts for reading alone.
    if scheme.lower() == "basic" and request.method == "GET" and request.scope["path"] in PAGE_PATHS:
        try:
            return base64.b64decode(value).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


async def _caller(request: Request) -> User:  # were it not async, FastAPI would run it in a thread of its own
    return request.state.user


Caller = Annotated[User, Depends(_caller)]
"""The user of a request."""


async def _gateway(request: Request, user: Caller) -> Gateway:
    """The gateway, for a request that names nothing of another user's."""
    gateway: Gateway = request.app.state.gateway
    if not user.is_operator:
        body = await _json_object(request)
        # One name may be in the path and in the body. Which of them counts is the handler's business, so check both.
        for name, value in (*request.path_params.items(), *request.query_params.multi_items(), *body.items()):
            if isinstance(value, str) and (name in _IDS or (name in _PATHS and value.startswith("tinker://"))):
                check_owner(gateway, user, value)
    return gateway


async def _json_object(request: Request) -> dict[str, object]:
    """The body if it is a JSON object, with any content type; otherwise an empty dictionary."""
    if request.scope["path"] == TRAINING_PATH:  # its handler checks
        return {}
    try:
        body = await request.json()  # Starlette keeps it, so that it is parsed once
    except (ValueError, RecursionError):  # a mistake, which the handler refuses
        return {}
    return body if isinstance(body, dict) else {}


Door = Annotated[Gateway, Depends(_gateway)]
"""The gateway, once everything that the request names is known to be its user's."""


def check_owner(gateway: Gateway, user: User, named: str) -> None:
    """Raises HTTPException 404 if this id or path is of a session of another user."""
    if user.is_operator:
        return
    owner = gateway.owner(named)
    if owner is not None and owner != user.name:
        # 404 and not 403: whether it exists is its owner's business
        raise HTTPException(404, f"there is no {named} of user {user.name}")
