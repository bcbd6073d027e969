"""What an operator sees: the status page, a line per request in a log, and numbers for Prometheus at `/metrics`.

The status page shows the operator all of a server, and each user what is theirs.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path

import psutil
from fastapi import APIRouter, FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ownloop_server.access import Caller, Door
from ownloop_server.answers import BUCKET_S
from ownloop_server.gateway import ClientSession, Gateway
from ownloop_server.keys import User
from rl.lora import Policy

status_routes = APIRouter()
_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


@status_routes.get("/")
async def page() -> Response:
    """The page: one file, which asks for `/status.json` every other second."""
    text = files("ownloop_server").joinpath("status.html").read_text(encoding="utf-8")
    return Response(text, media_type="text/html", headers={"Content-Security-Policy": _PAGE_POLICY})


@status_routes.get("/status.json")
async def status(door: Door, user: Caller) -> dict[str, object]:
    """What the page shows."""
    memory = await asyncio.to_thread(_memory)
    return {**status_of(door, user), **memory, "gpus": await _gpus()}


def status_of(gateway: Gateway, user: User) -> dict[str, object]:
    """The models, and the user's sessions; everyone's for an operator."""
    seen = [session for session in gateway.sessions.values() if user.is_operator or session.user == user.name]
    return {
        "user": user.name,
        "is_operator": user.is_operator,
        "uptime_s": round(time.monotonic() - gateway.started, 1),
        "requests_waiting": gateway.answers.num_waiting,
        "samples_running": gateway.samplers.num_running,
        "bucket_s": BUCKET_S,
        "models": [
            {
                "names": model.names,
                "snapshots": len(model.snapshots),
                "max_snapshots": model.snapshots.max_kept,
                "trained": model.throughput.history("trained"),
                "sampled": model.throughput.history("sampled"),
                "trained_tokens": model.throughput.totals["trained"],
                "sampled_tokens": model.throughput.totals["sampled"],
            }
            for model in gateway.models
        ],
        "sessions": [_session(gateway, session) for session in seen],
    }


def _session(gateway: Gateway, session: ClientSession) -> dict[str, object]:
    clients = [client for run_id, client in gateway.training.items() if run_id.startswith(f"{session.id}:")]
    samplers = [gateway.samplers.find(sampler_id) for sampler_id in gateway.samplers.of_session(session.id)]
    return {
        "id": session.id,
        "user": session.user,
        "silent_s": round(asyncio.get_running_loop().time() - session.last_seen, 1),
        "training": [
            {
                "id": client.run.id,
                "model": client.run.base_model,
                "rank": client.run.rank,
                "steps": client.num_steps,
                "tokens": client.num_tokens,
                "queue": client.turns.num_waiting,
                "is_running": client.turns.is_running,
                "checkpoints": len(gateway.database.checkpoints(client.run.id)),
            }
            for client in clients
        ],
        "sampling": [
            {
                "id": sampler.id,
                "model": sampler.base_model,
                "policy": sampler.path or _in_words(sampler.policy),
                "kept": sampler.policy is None or sampler.policy in sampler.model.snapshots,
            }
            for sampler in samplers
            if sampler is not None
        ],
    }


def _in_words(policy: Policy) -> str:
    if policy is None:
        return "the base model"
    return f"version {policy[1]} of {policy[0]}" if isinstance(policy, tuple) else f"the newest of {policy}"


def _memory() -> dict[str, object]:
    """Resident memory of the server and of the processes that it started, and of the host, in bytes."""
    own = psutil.Process()
    children: list[int] = []
    for child in own.children(recursive=True):
        try:
            children.append(child.memory_info().rss)
        except psutil.NoSuchProcess:  # it ended in between
            continue
    host = psutil.virtual_memory()
    return {
        "memory": {"server": own.memory_info().rss, "processes": children, "used": host.used, "total": host.total},
    }


async def _gpus() -> list[dict[str, object]]:
    """Memory and load of every GPU, from nvidia-smi."""
    if not Path("/proc/driver/nvidia/version").exists() or (command := shutil.which("nvidia-smi")) is None:
        return []
    query = ["--query-gpu=name,memory.used,memory.total,utilization.gpu", "--format=csv,noheader,nounits"]
    asked = await asyncio.create_subprocess_exec(command, *query, stdout=asyncio.subprocess.PIPE)
    output, _ = await asked.communicate()
    rows = [line.split(", ") for line in output.decode().splitlines()]
    return [
        {"name": row[0], "used_mib": row[1], "total_mib": row[2], "busy_percent": row[3]}
        for row in rows
        if len(row) == 4
    ]


log = logging.getLogger("ownloop.gateway")
_LONGEST_WAIT_S = 30.0


class _Tokens:
    """The counters that `Throughput` keeps."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterable[CounterMetricFamily]:
        """The counters that Prometheus' client asks for."""
        counter = CounterMetricFamily("gateway_tokens", "Tokens trained and sampled.", labels=("model", "work"))
        for model in self._gateway.models:
            for work in ("trained", "sampled"):
                counter.add_metric((model.names[0], work), model.throughput.totals[work])
        yield counter


def add_monitoring(app: FastAPI, gateway: Gateway) -> None:
    """Adds the route `/metrics`, and has every request counted and logged."""
    registry = CollectorRegistry()
    requests = Counter("gateway_requests", "Requests by route and status.", ("route", "status"), registry=registry)
    seconds = Histogram(
        "gateway_request_seconds",
        "Seconds from a request to its answer. retrieve_future waits for results on purpose.",
        ("route",),
        registry=registry,
        buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, _LONGEST_WAIT_S),
    )
    for name, text, value in (
        ("sessions", "Sessions that have not ended.", lambda: len(gateway.sessions)),
        ("training_clients", "Adapters that clients train.", lambda: len(gateway.training)),
        ("sampling_clients", "Sampling clients.", lambda: len(gateway.samplers)),
        (
            "snapshots",
            "Versions that the generator keeps.",
            lambda: sum(len(model.snapshots) for model in gateway.models),
        ),
        ("requests_waiting", "Accepted requests without a result.", lambda: gateway.answers.num_waiting),
        ("results_kept", "Requests whose result may still be asked for.", lambda: len(gateway.answers)),
    ):
        Gauge(f"gateway_{name}", text, registry=registry).set_function(value)

    registry.register(_Tokens(gateway))

    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    def watch(scope: Scope, status: int, took_s: float) -> None:
        # The route's pattern: paths hold ids, and a series per id would grow without end.
        route = getattr(scope.get("route"), "path", "unknown")
        requests.labels(route, str(status)).inc()
        seconds.labels(route).observe(took_s)
        user = scope.get("state", {}).get("user")
        who = f" {user.name}" if user is not None and user.name else ""
        log.info("%s %s %d %.1f ms%s", scope["method"], scope["path"], status, took_s * 1000, who)

    app.add_api_route("/metrics", metrics, methods=["GET"])
    app.add_middleware(_Watched, watch=watch)


class _Watched:
    """An ASGI middleware that reports every request when it has ended.

    Starlette's own `middleware("http")` starts a task and a stream for each request, which takes as long as the rest.
    """

    def __init__(self, app: ASGIApp, *, watch: Callable[[Scope, int, float], None]) -> None:
        """`watch` gets the scope, the status and the seconds until the end of the answer."""
        self._app = app
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            self._watch(scope, status, time.perf_counter() - began)
