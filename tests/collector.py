"""A collector of spans: an HTTP server that reads what OTLP exporters send."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from tests.http_server import HttpAnswer, HttpRequest, answering
from tests.waiting import wait_until


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    service: str
    resource: dict[str, Any]
    trace_id: str
    id: str
    parent_id: str  # "": it has none
    name: str
    kind: str
    start: int
    end: int
    attributes: dict[str, Any]
    has_failed: bool
    message: str
    tracestate: str


@dataclass
class Collector:
    url: str = ""
    headers: list[dict[str, str]] = field(default_factory=list)  # of each message
    spans: list[ReceivedSpan] = field(default_factory=list)

    def spans_of(self, trace_id: str) -> list[ReceivedSpan]:
        """Those that have come so far, by their start."""
        return sorted((span for span in list(self.spans) if span.trace_id == trace_id), key=lambda span: span.start)

    def wait_for(self, trace_id: str, num_spans: int) -> list[ReceivedSpan]:
        wait_until(lambda: len(self.spans_of(trace_id)) >= num_spans)
        return self.spans_of(trace_id)

    def take(self, request: ExportTraceServiceRequest) -> None:
        for of_resource in request.resource_spans:
            resource = _attributes(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                self.spans += [_received(resource, span) for span in of_scope.spans]


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    def answer(request: HttpRequest) -> HttpAnswer:
        is_known = request.path == "/v1/traces"
        if is_known:
            is_packed = request.headers.get("content-encoding") == "gzip"
            collector.headers.append({name.lower(): value for name, value in request.headers.items()})
            collector.take(
                ExportTraceServiceRequest.FromString(gzip.decompress(request.body) if is_packed else request.body)
            )
        return HttpAnswer(
            ExportTraceServiceResponse().SerializeToString(),
            200 if is_known else 404,
            {"content-type": "application/x-protobuf"},
        )

    with answering(answer) as server:
        collector.url = server.url
        yield collector


def _received(resource: dict[str, Any], span: trace_pb2.Span) -> ReceivedSpan:
    return ReceivedSpan(
        service=resource["service.name"],
        resource=resource,
        trace_id=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        has_failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        message=span.status.message,
        tracestate=span.trace_state,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    def value_of(value: AnyValue) -> Any:
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [value_of(each) for each in value.array_value.values]
        return getattr(value, kind)

    def pair_of(pair: KeyValue) -> tuple[str, Any]:
        return pair.key, value_of(pair.value)

    return dict(map(pair_of, pairs))
