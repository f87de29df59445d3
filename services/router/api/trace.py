"""Adds attributes of an answer to the span of its request."""

from __future__ import annotations

import time

from cluster.telemetry.tracing import Attributes, Span
from services.router.api.request import ApiRequest
from services.router.output.piece import Piece


class AnswerTrace:
    """Sets the attributes of a request's span that describe its answer, if the span is recorded."""

    def __init__(self, span: Span, arrived_at: float) -> None:
        """`arrived_at`: arrival of the request (time.perf_counter)."""
        self.span = span
        self._arrived_at = arrived_at
        self._num_tokens = 0
        self._finish_reasons: dict[int, str] = {}  # by choice
        self._has_tokens = False

    def describe(self, request: ApiRequest, model: str, request_id: str, seed: int, num_prompt_tokens: int) -> None:
        if self.span.is_recorded:
            self.span.set(_request_attributes(request, model, request_id, seed, num_prompt_tokens))

    def note(self, index: int, piece: Piece) -> None:
        """Records a new piece of the choice `index`. Must only be called if the span is recorded."""
        self._num_tokens += len(piece.token_ids)
        if piece.token_ids and not self._has_tokens:
            self._has_tokens = True
            self.span.set({"gen_ai.latency.time_to_first_token": time.perf_counter() - self._arrived_at})
        if piece.finish_reason is not None:
            self._finish_reasons[index] = piece.finish_reason

    def end(self) -> None:
        """Records that a choice has ended or was cancelled. Each call overwrites the earlier totals."""
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
    """Returns the attributes of the request, without any of its text."""
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
