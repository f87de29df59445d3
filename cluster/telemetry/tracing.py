"""Spans of requests: the interface that programs use, and its implementation without tracing.

`cluster.telemetry.otlp` has the implementation with OpenTelemetry. It is imported only if tracing is on.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.config import TracingConfig
from cluster.errors import ConfigurationError

Attributes = Mapping[str, str | bool | int | float | Sequence[str] | None]
"None: the attribute is omitted."

SpanKind = Literal["internal", "server", "client"]

_REQUIRED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span in W3C's headers, to pass to other programs. Without `traceparent` it is no span."""

    traceparent: str = ""
    tracestate: str = ""


class Span:
    """A span that is not recorded. Without tracing all spans have this class.

    Times are nanoseconds since the epoch; None: now.
    """

    is_recorded = False
    context = TraceContext()

    def start_child(
        self, name: str, kind: SpanKind = "internal", attributes: Attributes | None = None, at: int | None = None
    ) -> Span:
        return self

    def set(self, attributes: Attributes) -> None: ...

    def fail(self, error_type: str, message: str = "") -> None:
        """Marks the span as failed. Does not end the span."""

    def end(self, at: int | None = None) -> None: ...


NO_SPAN = Span()


class Tracer:
    """Starts the spans of one program. This class is the implementation without tracing."""

    def start(self, name: str, kind: SpanKind, parent: TraceContext, attributes: Attributes | None = None) -> Span:
        """Returns a new span of the trace of `parent`, or of a new trace; NO_SPAN if the trace is not sampled."""
        return NO_SPAN

    def close(self) -> None:
        """Exports ended spans. Blocks for at most some seconds."""


def check_tracing(config: TracingConfig) -> None:
    """Raises ConfigurationError if tracing is on and OpenTelemetry is not installed."""
    if config.endpoint is not None and not all(_is_installed(name) for name in _REQUIRED):
        raise ConfigurationError("tracing.endpoint needs OpenTelemetry: pip install 'outrider[tracing]'")


def make_tracer(config: TracingConfig, service: str, instance: str) -> Tracer:
    """Returns the tracer of the program `service`; `instance` distinguishes several of them.

    Raises ConfigurationError when OpenTelemetry is not installed.
    """
    if config.endpoint is None:
        return Tracer()
    check_tracing(config)
    from cluster.telemetry.otlp import OtlpTracer  # imported here: without tracing the package is not needed

    return OtlpTracer(config.endpoint, service, instance)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # raised if a parent package is missing
        return False
