"""The span of a call on a target, below the span of the HTTP request."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from cluster.errors import OutriderError
from cluster.telemetry.tracing import NO_SPAN, Attributes, Span
from cluster.wire.replies import CallReply
from protos.speculation.v1 import target_pb2
from services.router.targets.replica import Replica, ReplicaLostError

FINISH_REASONS = {
    target_pb2.FINISH_REASON_UNSPECIFIED: None,
    target_pb2.FINISH_REASON_STOP: "stop",
    target_pb2.FINISH_REASON_LENGTH: "length",
}


class CallSpan:
    """The span of one call on one target, from entering it to leaving it."""

    def __init__(self, parent: Span, replica: Replica, request: target_pb2.GenerateRequest) -> None:
        """Starts the span, and writes it into `request` as the parent of the target's span."""
        self._span = NO_SPAN
        if parent.is_recorded:
            self._span = parent.start_child(
                "speculation.v1.Target/GenerateMany", "client", _call_attributes(replica, request)
            )
            request.traceparent, request.tracestate = self._span.context.traceparent, self._span.context.tracestate
        self._finish_reason = "abort"

    def note(self, last: CallReply) -> None:
        """Records `last`, the last reply of a completed call. A call that is left without one was cancelled."""
        self._finish_reason = FINISH_REASONS.get(last.finish_reason) or "unknown"

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
