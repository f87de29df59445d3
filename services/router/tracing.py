"""The router's spans: of each request, and within it of each call on a target, of which one that is moved has several.

POST /v1/completions
    speculation.v1.Target/GenerateMany    one for each choice and target; the target's own span is below it
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import OutriderError
from cluster.telemetry.tracing import NO_SPAN, Attributes, Span, TraceContext, Tracer
from cluster.wire.replies import CallReply
from protos.speculation.v1 import target_pb2
from services.router.api.reply import Piece
from services.router.api.request import ApiRequest
from services.router.errors import CLIENT_CLOSED_REQUEST
from services.router.http.streaming import NotedSend
from services.router.targets.replica import Replica, ReplicaLostError

_FINISH_REASONS = {target_pb2.FINISH_REASON_STOP: "stop", target_pb2.FINISH_REASON_LENGTH: "length"}


class Tracing:
    """Gives every request to `paths` a span, in the trace that its client began if it began one."""

    def __init__(self, app: ASGIApp, *, paths: frozenset[str], tracer: Tracer) -> None:
        self._app = app
        self._paths = paths
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        span = self._start(scope)
        state = scope.setdefault("state", {})
        state["span"] = span
        noted = NotedSend(send)
        try:
            await self._app(scope, receive, noted)
        except Exception:
            state.setdefault("outcome", 500)  # even when an answer has begun
            raise
        finally:
            status = noted.status or 500  # 500: of a request that ends without an answer
            _end(span, status, state.get("outcome", status))

    def _start(self, scope: Scope) -> Span:
        headers = Headers(scope=scope)
        return self._tracer.start(
            f"POST {scope['path']}",
            "server",
            TraceContext(headers.get("traceparent", ""), headers.get("tracestate", "")),
            {
                "http.request.method": "POST",
                "http.route": scope["path"],
                "url.path": scope["path"],
                "url.scheme": scope["scheme"],
                "http.response.header.x-request-id": [scope["state"]["request_id"]],
            },
        )


def _end(span: Span, status: int, outcome: int) -> None:
    """`outcome`: the status that the request would have had if its answer had not begun."""
    span.set({"http.response.status_code": status, "outrider.outcome": outcome})
    if outcome == CLIENT_CLOSED_REQUEST:
        span.fail(str(outcome), "the client left")
    elif outcome >= 500:  # others are the client's, and no failures of ours
        span.fail(str(outcome))
    span.end()


def span_of(scope: Scope) -> Span:
    """The span of the request of `scope`."""
    span: Span = scope.get("state", {}).get("span", NO_SPAN)
    return span


class AnswerTrace:
    """Sets the attributes of a request's span that describe its answer, if the span is recorded."""

    def __init__(self, span: Span, arrived_at: float) -> None:
        """`arrived_at`: when the request came (time.perf_counter)."""
        self.span = span
        self._arrived_at = arrived_at
        self._num_tokens = 0
        self._finish_reasons: dict[int, str] = {}  # by choice
        self._has_tokens = False

    def describe(self, request: ApiRequest, model: str, request_id: str, seed: int, num_prompt_tokens: int) -> None:
        if self.span.is_recorded:
            self.span.set(_request_attributes(request, model, request_id, seed, num_prompt_tokens))

    def note(self, index: int, piece: Piece) -> None:
        """The choice `index` has a new piece."""
        if not self.span.is_recorded:
            return
        self._num_tokens += len(piece.token_ids)
        if piece.token_ids and not self._has_tokens:
            self._has_tokens = True
            self.span.set({"gen_ai.latency.time_to_first_token": time.perf_counter() - self._arrived_at})
        if piece.finish_reason is not None:
            self._finish_reasons[index] = piece.finish_reason

    def end(self) -> None:
        """A choice has ended or was given up; the last one's call counts."""
        if self.span.is_recorded:
            reasons = [reason for _, reason in sorted(self._finish_reasons.items())]
            self.span.set(
                {
                    "gen_ai.usage.output_tokens": self._num_tokens,
                    "gen_ai.response.finish_reasons": reasons or None,
                    "gen_ai.latency.e2e": time.perf_counter() - self._arrived_at,
                }
            )


def _request_attributes(
    request: ApiRequest, model: str, request_id: str, seed: int, num_prompt_tokens: int
) -> Attributes:
    """No text of the request is among them."""
    return {
        "outrider.request_id": request_id,
        "gen_ai.operation.name": "text_completion" if request.prompt_field == "prompt" else "chat",
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": request.model or model,
        "gen_ai.request.max_tokens": request.token_limit[1],
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.request.top_k": request.top_k or None,
        "gen_ai.request.frequency_penalty": request.frequency_penalty or None,
        "gen_ai.request.presence_penalty": request.presence_penalty or None,
        "gen_ai.request.choice.count": request.n,
        "gen_ai.request.stream": request.stream,
        # A span's integers have 64 bits, and so have seeds.
        "gen_ai.request.seed": seed,
        "gen_ai.response.id": request_id,
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": num_prompt_tokens,
    }


class CallSpan:
    """The span of one call on one target, from entering it to leaving it."""

    def __init__(self, parent: Span, replica: Replica, request: target_pb2.GenerateRequest) -> None:
        """`request` is told of the span, for the target's to be below it."""
        self._span = NO_SPAN
        if parent.is_recorded:
            self._span = parent.start_child(
                "speculation.v1.Target/GenerateMany", "client", _call_attributes(replica, request)
            )
            request.traceparent, request.tracestate = self._span.context.traceparent, self._span.context.tracestate
        self._finish_reason = "abort"

    def note(self, last: CallReply) -> None:
        """The last reply of a call that came to its end. A call that is left without one was cancelled."""
        self._finish_reason = _FINISH_REASONS.get(last.finish_reason, "unknown")

    def __enter__(self) -> CallSpan:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, ReplicaLostError):
            self._span.fail(error.reason, error.message)
        elif isinstance(error, OutriderError):
            self._span.fail(error.error_type, error.message)
        else:
            self._span.set({"gen_ai.response.finish_reasons": [self._finish_reason]})
        self._span.end()


def _call_attributes(replica: Replica, request: target_pb2.GenerateRequest) -> Attributes:
    return {
        "rpc.system": "grpc",
        "rpc.service": "speculation.v1.Target",
        "rpc.method": "GenerateMany",
        "server.address": replica.address,
        "outrider.request_id": request.request_id,
        "outrider.choice_index": request.choice_index,
        "outrider.num_earlier_tokens": request.num_generated_tokens,
    }
