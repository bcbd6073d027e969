"""What an operator sees: a line per request in a log, and numbers for Prometheus at `/metrics`."""

import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily

from controller.gateway.gateway import Gateway

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

    async def watch(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        began = time.perf_counter()
        status = 500
        try:
            response = await answer(request)
            status = response.status_code
        finally:
            took_s = time.perf_counter() - began
            # The route's pattern: paths hold ids, and a series per id would grow for ever.
            route = getattr(request.scope.get("route"), "path", "unknown")
            requests.labels(route, str(status)).inc()
            seconds.labels(route).observe(took_s)
            user = getattr(request.state, "user", None)
            who = f" {user.name}" if user is not None and user.name else ""
            log.info("%s %s %d %.1f ms%s", request.method, request.url.path, status, took_s * 1000, who)
        return response

    app.add_api_route("/metrics", metrics, methods=["GET"])
    app.middleware("http")(watch)
