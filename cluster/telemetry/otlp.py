"""Spans by OpenTelemetry, exported by OTLP over HTTP. Needs the extra `outrider[tracing]`.

A thread exports spans in batches. `end` of a span never waits for this thread: if the collector is slow or unreachable,
spans are dropped.

The environment variables of the SDK work unless a setting of ours replaces them: OTEL_RESOURCE_ATTRIBUTES,
OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_SCHEDULE_DELAY and so on.
"""

from __future__ import annotations

import importlib.metadata
import logging
import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cluster.telemetry.tracing import NO_SPAN, Attributes, Span, SpanKind, TraceContext, Tracer

_KINDS = {
    "internal": trace.SpanKind.INTERNAL,
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
}
_W3C = TraceContextTextMapPropagator()
_CLOSE_SECONDS = 2.0
_COMPLAINT_SECONDS = 60.0


class OtlpTracer(Tracer):
    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        _complain_seldom()
        own = {
            "service.name": service,
            "service.namespace": "outrider",
            "service.instance.id": instance,
            "service.version": importlib.metadata.version("outrider"),
        }
        self._provider = TracerProvider(
            # The environment's attributes take precedence over ours; `create` would reverse the order.
            resource=Resource.create({**own, **OTELResourceDetector().detect().attributes}),
            shutdown_on_exit=False,  # a shutdown at exit would wait for an unreachable collector
        )
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("outrider")

    def start(self, name: str, kind: SpanKind, parent: TraceContext, attributes: Attributes | None = None) -> Span:
        headers = {"traceparent": parent.traceparent, "tracestate": parent.tracestate}
        context = _W3C.extract(headers, context=Context())
        return _start(self._tracer, name, kind, context, attributes)

    def close(self) -> None:
        # A shutdown has no timeout, so it runs in a daemon thread, which may outlive this call.
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


class _RecordedSpan(Span):
    is_recorded = True

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._own = trace.set_span_in_context(span, Context())
        headers: dict[str, str] = {}
        _W3C.inject(headers, context=self._own)
        self.context = TraceContext(headers.get("traceparent", ""), headers.get("tracestate", ""))

    def start_child(
        self, name: str, kind: SpanKind = "internal", attributes: Attributes | None = None, at: int | None = None
    ) -> Span:
        return _start(self._tracer, name, kind, self._own, attributes, at)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(_present(attributes))

    def fail(self, error_type: str, message: str = "") -> None:
        self._span.set_attribute("error.type", error_type)
        self._span.set_status(trace.StatusCode.ERROR, message or None)

    def end(self, at: int | None = None) -> None:
        self._span.end(at)


def _start(
    tracer: trace.Tracer,
    name: str,
    kind: SpanKind,
    context: Context,
    attributes: Attributes | None,
    at: int | None = None,
) -> Span:
    span = tracer.start_span(name, context, _KINDS[kind], _present(attributes or {}), start_time=at)
    return _RecordedSpan(tracer, span) if span.is_recording() else NO_SPAN


def _present(attributes: Attributes) -> Mapping[str, str | bool | int | float | Sequence[str]]:
    return {name: value for name, value in attributes.items() if value is not None}


class _Seldom(logging.Filter):
    """Log filter that passes one record per period."""

    def __init__(self) -> None:
        super().__init__()
        self._next_at = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if time.monotonic() < self._next_at:
            return False
        self._next_at = time.monotonic() + _COMPLAINT_SECONDS
        return True


def _complain_seldom() -> None:
    """Limits the log lines about an unreachable collector to one per period, instead of several per batch."""
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # its messages do not mention the retries
    logger = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    if not any(isinstance(each, _Seldom) for each in logger.filters):
        logger.addFilter(_Seldom())
