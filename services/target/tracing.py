"""The spans of one call on a target, made at its end from a few timestamps, outside the engine's loop.

speculation.v1.Target/GenerateMany    the call
    queue                             from its arrival to its admission
    prefill                           to its first token
    decode                            to its last: all rounds in one span, with their sums
"""

from __future__ import annotations

import time

from cluster.engine.sequence import FinishReason
from cluster.errors import OutriderError
from cluster.targets.base import GenerationOutput
from cluster.telemetry.tracing import Attributes, Span, TraceContext, Tracer
from protos.speculation.v1 import target_pb2

# Not an error: a router also cancels when its stop string was found.
_ABORTED = "abort"


class CallTrace:
    def __init__(self, span: Span, request: target_pb2.GenerateRequest) -> None:
        self._span = span
        self._num_input_tokens = len(request.prompt_token_ids)
        self._arrived_at = time.time_ns()
        self._admitted_at: int | None = None
        self._first_token_at: int | None = None
        self._num_tokens = 0
        # Of the steps after the one with the first token.
        self._num_rounds = 0
        self._num_drafts = 0  # rounds that verified at least one draft token
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0

    def count(self, output: GenerationOutput) -> None:
        if output.admitted_at is not None:
            # A preempted sequence is admitted again: in its trace it does not return to the queue.
            self._admitted_at = self._admitted_at or output.admitted_at
            return
        if not output.token_ids:
            return
        self._num_tokens += len(output.token_ids)
        if self._first_token_at is None:
            self._first_token_at = time.time_ns()
            return
        self._num_rounds += 1
        self._num_drafts += output.num_draft_tokens > 0
        self._num_draft_tokens += output.num_draft_tokens
        self._num_accepted_tokens += output.num_accepted_tokens

    def end(self, finish_reason: FinishReason | None, error: OutriderError | None) -> None:
        """Ends the span. Without `finish_reason` and `error` the call was cancelled."""
        now = time.time_ns()
        self._add_parts(now)
        first, admitted, arrived = self._first_token_at, self._admitted_at, self._arrived_at
        self._span.set(
            {
                "gen_ai.usage.output_tokens": self._num_tokens,
                "gen_ai.latency.time_in_queue": _seconds(arrived, admitted),
                "gen_ai.latency.time_to_first_token": _seconds(arrived, first),
                "gen_ai.latency.time_in_model_prefill": _seconds(admitted, first),
                "gen_ai.latency.time_in_model_decode": _seconds(first, now),
                "gen_ai.latency.e2e": _seconds(arrived, now),
            }
        )
        if error is not None:
            self._span.fail(error.error_type, error.message)
        else:
            reason = _ABORTED if finish_reason is None else finish_reason.value
            self._span.set({"gen_ai.response.finish_reasons": [reason]})
        self._span.end(now)

    def _add_parts(self, now: int) -> None:
        """Adds the spans of the parts; the last part lasts to the end of the call."""
        self._add("queue", self._arrived_at, self._admitted_at or now)
        if self._admitted_at is None:
            return
        prompt: Attributes = {"gen_ai.usage.input_tokens": self._num_input_tokens}
        self._add("prefill", self._admitted_at, self._first_token_at or now, prompt)
        if self._first_token_at is not None:
            self._add("decode", self._first_token_at, now, self._decoding())

    def _add(self, name: str, start: int, end: int, attributes: Attributes | None = None) -> None:
        self._span.start_child(name, attributes=attributes, at=start).end(end)

    def _decoding(self) -> Attributes:
        rounds, drafted = self._num_rounds, self._num_draft_tokens
        return {
            "gen_ai.usage.output_tokens": self._num_tokens,
            "outrider.num_rounds": rounds,
            "outrider.num_drafts": self._num_drafts,
            "outrider.num_draft_tokens": drafted,
            "outrider.num_accepted_tokens": self._num_accepted_tokens,
            "outrider.mean_k": drafted / rounds if rounds else None,
            "outrider.draft_acceptance_rate": self._num_accepted_tokens / drafted if drafted else None,
        }


def trace_call(tracer: Tracer, request: target_pb2.GenerateRequest, model: str) -> CallTrace | None:
    """Returns the trace of a call that begins now; None if its router records none."""
    if not request.traceparent:
        return None
    span = tracer.start(
        "speculation.v1.Target/GenerateMany",
        "server",
        TraceContext(request.traceparent, request.tracestate),
        {
            "rpc.system": "grpc",
            "rpc.service": "speculation.v1.Target",
            "rpc.method": "GenerateMany",
            "outrider.request_id": request.request_id,
            "outrider.choice_index": request.choice_index,
            "outrider.num_earlier_tokens": request.num_generated_tokens,
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.response.model": model,
            "gen_ai.usage.input_tokens": len(request.prompt_token_ids) - request.num_generated_tokens,
        },
    )
    return CallTrace(span, request) if span.is_recorded else None


def _seconds(start: int | None, end: int | None) -> float | None:
    return None if start is None or end is None else (end - start) / 1e9
