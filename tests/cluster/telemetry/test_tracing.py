"""Tracers: off, without the package, and on, with a collector that is there or not."""

from __future__ import annotations

import importlib.util
import logging
import time

import pytest

from cluster.config import TracingConfig
from cluster.config.file import load_config
from cluster.errors import ConfigurationError
from cluster.telemetry.otlp import OtlpTracer
from cluster.telemetry.tracing import NO_SPAN, TraceContext, Tracer, check_tracing, make_tracer
from tests.collector import collecting

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
SAMPLED = TraceContext(f"00-{TRACE}-{CALLER}-01", "vendor=1")
UNSAMPLED = TraceContext(f"00-{TRACE}-{CALLER}-00")
NOWHERE = "http://127.0.0.1:9"


def test_off_a_tracer_does_nothing() -> None:
    tracer = make_tracer(TracingConfig(), "service", "instance")
    span = tracer.start("request", "server", SAMPLED)
    assert type(tracer) is Tracer
    assert span is NO_SPAN
    assert span.start_child("part") is NO_SPAN
    assert span.context == TraceContext()
    span.set({"a": 1})
    span.fail("error")
    span.end()
    tracer.close()


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    check_tracing(TracingConfig())
    with pytest.raises(ConfigurationError, match=r"tracing\.endpoint needs .*outrider\[tracing\]"):
        make_tracer(TracingConfig(endpoint=NOWHERE), "service", "instance")


@pytest.mark.parametrize("endpoint", ["localhost:4318", "http://", "grpc://host:4317", ""])
def test_an_endpoint_is_a_url(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match=r"tracing\.endpoint"):
        load_config(None, [f"tracing.endpoint='{endpoint}'"])


def test_spans_reach_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.instance.id=mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=secret")
    with collecting() as collector:
        tracer = make_tracer(TracingConfig(endpoint=f"{collector.url}/"), "service", "instance")
        span = tracer.start("request", "server", SAMPLED, {"a": 1, "nothing": None})
        child = span.start_child("part", at=1_000)
        child.end(2_000)
        span.set({"b": [1.5], "nothing": None})
        span.fail("some_error", "why")
        span.end()
        tracer.close()
        part, request = collector.spans_of(TRACE)
        assert collector.headers[0]["authorization"] == "secret"
    assert (request.name, request.kind, request.parent_id) == ("request", "server", CALLER)
    assert request.tracestate == "vendor=1"
    assert request.attributes == {"a": 1, "b": [1.5], "error.type": "some_error"}
    assert (request.has_failed, request.message) == (True, "why")
    assert (part.name, part.kind, part.parent_id) == ("part", "internal", request.id)
    assert (part.start, part.end, part.has_failed) == (1_000, 2_000, False)
    resource = request.resource
    assert (resource["service.name"], resource["service.instance.id"]) == ("service", "mine")
    assert resource["deployment.environment.name"] == "test"
    assert span.context == TraceContext(f"00-{TRACE}-{request.id}-01", "vendor=1")


def test_what_is_sampled_is_the_callers_decision_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    always = OtlpTracer(NOWHERE, "service", "instance")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    never = OtlpTracer(NOWHERE, "service", "instance")
    assert never.start("request", "server", TraceContext()) is NO_SPAN
    assert never.start("request", "server", SAMPLED).is_recorded
    assert always.start("request", "server", UNSAMPLED) is NO_SPAN
    for header in ("", "nonsense", f"00-{'0' * 32}-{CALLER}-01"):
        span = always.start("request", "server", TraceContext(header))
        assert span.is_recorded
        assert TRACE not in span.context.traceparent


def test_a_collector_that_is_away_is_worth_one_line(caplog: pytest.LogCaptureFixture) -> None:
    exporter_log = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    for each in list(exporter_log.filters):
        exporter_log.removeFilter(each)
    tracers = [OtlpTracer(NOWHERE, "service", "instance") for _ in range(3)]
    begun_at = time.monotonic()
    for tracer in tracers:
        tracer.start("request", "server", SAMPLED).end()
        tracer.close()
    assert time.monotonic() - begun_at < 30
    assert len([record for record in caplog.records if record.name.startswith("opentelemetry")]) <= 1
