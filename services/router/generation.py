"""Runs one request on a target: token IDs come back, pieces of text go out, and what happened is counted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from cluster.errors import InternalError, UnavailableError
from cluster.telemetry.metrics import RouterMetrics
from cluster.tokenization import IncrementalDetokenizer, Tokenizer
from protos.speculation.v1 import target_pb2
from services.router.targets import Target

_FINISH_REASONS = {
    target_pb2.FINISH_REASON_UNSPECIFIED: None,
    target_pb2.FINISH_REASON_STOP: "stop",
    target_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """What one reply added. `text` may be empty: tokens can end inside a character."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None  # "stop" or "length" on the last piece


async def generate(
    target: Target,
    request: target_pb2.GenerateRequest,
    *,
    tokenizer: Tokenizer,
    metrics: RouterMetrics,
    arrived_at: float,
) -> AsyncGenerator[Piece, None]:
    """Yields the pieces of the answer to `request`, which came in at `arrived_at` (time.perf_counter).

    Ends after a piece with a finish reason or with an OutriderError. Closing it frees the sequence.
    """
    detokenizer = IncrementalDetokenizer(tokenizer)
    has_token = False
    async with contextlib.aclosing(target.generate(request)) as replies:
        async for reply in replies:
            if reply.finish_reason not in _FINISH_REASONS:
                raise UnavailableError("the target worker gave the request up; retry")
            finish_reason = _FINISH_REASONS[reply.finish_reason]
            if reply.token_ids and not has_token:
                has_token = True
                metrics.prompt_tokens.inc(len(request.prompt_token_ids))
                metrics.time_to_first_token.observe(time.perf_counter() - arrived_at)
            _count(reply, metrics)
            text = detokenizer.push(reply.token_ids)
            if finish_reason is None:
                yield Piece(text, tuple(reply.token_ids), None)
                continue
            metrics.e2e_latency.observe(time.perf_counter() - arrived_at)
            yield Piece(text + detokenizer.flush(), tuple(reply.token_ids), finish_reason)
            return
    raise InternalError("the target worker ended the answer without a finish reason")


def _count(reply: target_pb2.GenerateReply, metrics: RouterMetrics) -> None:
    metrics.generation_tokens.inc(len(reply.token_ids))
    metrics.num_drafts.inc(reply.speculation.num_drafts)
    metrics.num_draft_tokens.inc(reply.speculation.num_draft_tokens)
    metrics.num_accepted_tokens.inc(reply.speculation.num_accepted_tokens)
