"""What an operator sees: a line per request in a log, and numbers for Prometheus at `/metrics`."""

import logging
import time
from collections.abc import Callable, Iterable

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controller.server.gateway import Gateway

log = logging.getLogger("ownloop.gateway")
_LONGEST_WAIT_S = 30.0


class _Tokens:
    """The counters that `Throughput` keeps."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterable[CounterMetricFamily]:
        """As Prometheus' client asks for it."""
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
        # The route's pattern: paths hold ids, and a series per id would grow for ever.
        route = getattr(scope.get("route"), "path", "unknown")
        requests.labels(route, str(status)).inc()
        seconds.labels(route).observe(took_s)
        user = scope.get("state", {}).get("user")
        who = f" {user.name}" if user is not None and user.name else ""
        log.info("%s %s %d %.1f ms%s", scope["method"], scope["path"], status, took_s * 1000, who)

    app.add_api_route("/metrics", metrics, methods=["GET"])
    app.add_middleware(_Watched, watch=watch)


class _Watched:
    """An ASGI middleware that tells of every request when it has ended.

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
