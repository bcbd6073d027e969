"""What OpenTelemetry's own readers and a collector get of a run."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs the extra opentelemetry, which is not installed")

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from controller.runs.folder import RunFolder
from controller.runs.observers import Observers
from ownloop_report import opentelemetry_run
from rl.system.timeline import TIMELINE, Timeline
from tests.waiting import LIMIT_S


def logged(folder: RunFolder, num_steps: int = 3) -> list[tuple[str, float, float]]:
    """Logs steps of a run with a timeline; returns (name, begin, end) of its spans."""
    observers = Observers(["opentelemetry"], folder, pytest.fail)
    timeline = Timeline(folder.path / TIMELINE)
    for step in range(1, num_steps + 1):
        with timeline.record("controller", f"generate {step}"), timeline.record("trainer", f"forward {step}"):
            time.sleep(0.02)
        if step != 2:  # it is written every few seconds
            timeline.write()
        row = {"step": float(step), "reward_mean": step / 8, "loss": float("nan") if step == 3 else 0.5}
        # Longer than it was: it is dated from its log, and a busy machine may pause before that.
        observers.log_metrics({**row, "seconds_step": 60.0})
    observers.log_metrics({"step": float(num_steps), "eval_reward": 0.75})
    observers.close()
    folder.flush()
    return [(name, begin, end) for _, name, _, begin, end in opentelemetry_run.read_timeline(folder.path / TIMELINE)]


def test_spans_and_gauges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(opentelemetry_run, "exporters", lambda: (spans, reader))
    monkeypatch.setattr(type(reader), "force_flush", lambda self, timeout_millis=0: shown.append(values(self)) or True)
    expected = logged(RunFolder(tmp_path / "a", {"seed": 3}))
    made = {span.name: span for span in spans.get_finished_spans()}
    assert len(made) == len(spans.get_finished_spans()) == 3 + 6
    for name, begin, end in expected:
        span, step = made[name], made[f"step {name[-1]}"]
        assert (span.start_time, span.end_time) == (int(begin * 1e9), int(end * 1e9))
        assert getattr(span.parent, "span_id", None) == getattr(step.get_span_context(), "span_id", 0)
        process = "controller" if name.startswith("generate") else "trainer"
        assert span.attributes == {"ownloop.process": process, "ownloop.lane": 0}
    assert made["step 2"].attributes == {"ownloop.step": 2}
    assert made["step 1"].resource.attributes["ownloop.run"] == "a"
    assert [row["ownloop.train.reward_mean"] for row in shown] == [0.125, 0.25, 0.375, 0.375]
    assert [row["ownloop.step"] for row in shown] == [1, 2, 3, 3]
    assert (shown[2]["ownloop.train.loss"], shown[3]["ownloop.eval.reward"]) == (0.5, 0.75)


def values(reader: InMemoryMetricReader) -> dict[str, Any]:
    """Name -> value of all gauges."""
    data: Any = reader.get_metrics_data()
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    return {metric.name: metric.data.data_points[0].value for metric in metrics}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[bytes]]]:
    """What a collector of OTLP gets, by path."""
    got: dict[str, list[bytes]] = {"/v1/traces": [], "/v1/metrics": []}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got[self.path].append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(opentelemetry_run, "_END_S", LIMIT_S)  # a run that ends waits until all has come
    yield got
    server.shutdown()
    server.server_close()


def test_a_collector_gets_every_step(tmp_path: Path, collector: dict[str, list[bytes]]) -> None:
    logged(RunFolder(tmp_path / "a", {"seed": 3}))
    names: list[str] = []
    for body in collector["/v1/traces"]:
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names += [span.name for scope in of_resource.scope_spans for span in scope.spans]
    spans = [f"{name} {step}" for step in (1, 2, 3) for name in ("step", "generate", "forward")]
    assert sorted(names) == sorted(spans)
    rewards: list[float] = []
    for body in collector["/v1/metrics"]:
        for of_resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            metrics = [metric for scope in of_resource.scope_metrics for metric in scope.metrics]
            points = [m.gauge.data_points[0] for m in metrics if m.name == "ownloop.train.reward_mean"]
            rewards += [point.as_double for point in points]
    assert list(dict.fromkeys(rewards)) == [0.125, 0.25, 0.375]


def test_a_resumed_run_sends_no_span_again(tmp_path: Path, collector: dict[str, list[bytes]]) -> None:
    folder = RunFolder(tmp_path / "a", {"seed": 3})
    logged(folder, 1)
    path, config = folder.path, folder.config
    del folder
    logged(RunFolder(path, config, resume=True), 1)
    bodies = b"".join(collector["/v1/traces"])
    assert (bodies.count(b"forward 1"), bodies.count(b"step 1")) == (2, 2)


def test_without_a_collector_a_run_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(opentelemetry_run, "_END_S", 0.5)
    start = time.monotonic()
    logged(RunFolder(tmp_path / "a", {"seed": 3}))
    assert time.monotonic() - start < 60
