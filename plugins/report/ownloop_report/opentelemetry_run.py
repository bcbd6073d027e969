"""OpenTelemetry (https://opentelemetry.io): the timeline as spans, metrics as gauges, sent by OTLP over HTTP.

Its own variables hold, such as OTEL_EXPORTER_OTLP_ENDPOINT (by default http://localhost:4318) and
OTEL_EXPORTER_OTLP_HEADERS. A thread of its own sends, so that a collector that does not answer delays no step.

    span "step 7"                     of the trace of step 7, as long as its metric seconds_step
      spans of timeline.json          "forward_backward", ..., each with ownloop.process and ownloop.lane
    gauge "ownloop.train.reward_mean" names of metrics, in the groups of other dashboards; ownloop.step says which step
"""

import math
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from controller.runs.folder import RunFolder
from controller.runs.observers import Observer
from ownloop_report.dashboards import grouped, run_id
from ownloop_report.timeline_spans import read_timeline
from rl.system.timeline import TIMELINE, wall_time

_SPANS_AT_ONCE = 1 << 17
_NUM_STEPS = 100
"""Steps whose spans may still come: the timeline is written every few seconds."""
_END_S = 20.0


def exporters() -> tuple[Any, Any]:
    """A span exporter and a metric reader of OTLP. Raises ValueError without the packages."""
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    except ImportError as error:
        raise ValueError(
            f"log names opentelemetry, which needs {error.name}: `pip install 'ownloop-report[opentelemetry]'`"
        ) from error
    return OTLPSpanExporter(), PeriodicExportingMetricReader(OTLPMetricExporter(), math.inf)


class OpenTelemetryRun(Observer):
    """Sends the metrics of each step, and the spans that the run's timeline has got since the last time."""

    only_named = True

    def __init__(self, folder: RunFolder) -> None:
        """The run is the instance of the service ownloop that has the run's name and id."""
        super().__init__(folder)
        span_exporter, reader = exporters()
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        about = {"service.name": "ownloop", "service.instance.id": run_id(folder.path), "ownloop.run": folder.path.name}
        resource = Resource.create(about)
        self._traces = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._traces.add_span_processor(BatchSpanProcessor(span_exporter, max_queue_size=_SPANS_AT_ONCE))
        self._metrics = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self._tracer, self._meter = self._traces.get_tracer("ownloop"), self._metrics.get_meter("ownloop")
        self._gauges: dict[str, Any] = {}
        self._steps: deque[tuple[float, float, Any]] = deque(maxlen=_NUM_STEPS)
        self._read_bytes, self._sent_until = 0, wall_time()  # a resumed run has sent what is there
        self._sending = ThreadPoolExecutor(1, "opentelemetry")

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """See `Observer`. A value that is not finite is left out."""
        self._sending.submit(self._send_metrics, dict(metrics), wall_time())

    def close(self) -> None:
        """See `Observer`. Waits a little for a collector, and gives up what it has not taken by then."""
        self.folder.flush()  # the timeline of a run that reached its end
        last = [
            self._sending.submit(each) for each in (self._send_spans, self._traces.shutdown, self._metrics.shutdown)
        ]
        wait(last, _END_S)
        self._sending.shutdown(wait=False, cancel_futures=True)

    def _send_metrics(self, metrics: Mapping[str, float], now: float) -> None:
        for name, value in grouped(metrics).items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(f"ownloop.{name.replace('/', '.')}")
            if math.isfinite(value):
                self._gauges[name].set(value)
        self._metrics.force_flush()  # a gauge keeps its last value alone
        if (seconds := metrics.get("seconds_step")) is not None:
            from opentelemetry.trace import set_span_in_context

            begin, step = now - seconds, int(metrics["step"])
            span = self._tracer.start_span(f"step {step}", start_time=_ns(begin), attributes={"ownloop.step": step})
            span.end(_ns(now))
            self._steps.append((begin, now, set_span_in_context(span)))
            self._send_spans()

    def _send_spans(self) -> None:
        """Sends the spans of the timeline that are new. A span belongs to the step in which its middle lies."""
        file = self.folder.path / TIMELINE
        size = file.stat().st_size if file.exists() else 0
        if size == self._read_bytes:
            return
        spans = read_timeline(file, size - self._read_bytes + 4096)  # a little of the old, whose end was overwritten
        self._read_bytes = size
        for process, name, lane, begin, end in spans:
            if end > self._sent_until:
                middle = (begin + end) / 2
                step = next((context for start, stop, context in self._steps if start <= middle <= stop), None)
                about = {"ownloop.process": process, "ownloop.lane": lane}
                self._tracer.start_span(name, step, attributes=about, start_time=_ns(begin)).end(_ns(end))
        self._sent_until = max([self._sent_until, *(span[-1] for span in spans)])
        self._traces.force_flush()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
