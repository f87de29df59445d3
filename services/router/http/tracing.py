"""The router's spans: one for each request, and below it one for each call on a target.

POST /v1/completions
    speculation.v1.Target/GenerateMany    one for each choice and target; the target's own span is below it
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.telemetry.tracing import NO_SPAN, Span, TraceContext, Tracer
from services.router.errors import CLIENT_CLOSED_REQUEST
from services.router.http.middleware import route_of
from services.router.http.streaming import NotedSend


class Tracing:
    """Records a span for every POST request to `routes`.

    The span belongs to the client's trace if the request has one.
    """

    def __init__(self, app: ASGIApp, *, routes: frozenset[str], tracer: Tracer) -> None:
        self._app = app
        self._routes = routes
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or route_of(scope) not in self._routes:
            await self._app(scope, receive, send)
            return
        span = self._start(scope)
        state = scope.setdefault("state", {})
        state["span"] = span
        noted = NotedSend(send)
        try:
            await self._app(scope, receive, noted)
        except Exception:
            state.setdefault("outcome", 500)  # includes errors after the answer has begun
            raise
        finally:
            status = noted.status or 500  # 500: a request that ended without an answer
            _end(span, status, state.get("outcome", status))

    def _start(self, scope: Scope) -> Span:
        headers = Headers(scope=scope)
        return self._tracer.start(
            f"POST {route_of(scope)}",
            "server",
            TraceContext(headers.get("traceparent", ""), headers.get("tracestate", "")),
            {
                "http.request.method": "POST",
                "http.route": route_of(scope),
                "url.path": scope["path"],
                "url.scheme": scope["scheme"],
                "http.response.header.x-request-id": [scope["state"]["request_id"]],
            },
        )


def _end(span: Span, status: int, outcome: int) -> None:
    """Ends `span`. `outcome`: the status that the request would have had if its answer had not begun."""
    span.set({"http.response.status_code": status, "outrider.outcome": outcome})
    if outcome == CLIENT_CLOSED_REQUEST:
        span.fail(str(outcome), "the client left")
    elif outcome >= 500:  # smaller codes are the client's errors
        span.fail(str(outcome))
    span.end()


def span_of(scope: Scope) -> Span:
    """Returns the span of the request of `scope`; NO_SPAN if it is not traced."""
    span: Span = scope.get("state", {}).get("span", NO_SPAN)
    return span
