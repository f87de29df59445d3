"""Runs sequences on targets: token IDs come back, pieces of text go out, and what happened is counted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence

from cluster.errors import UnavailableError
from cluster.telemetry.metrics import RouterMetrics
from cluster.telemetry.tracing import NO_SPAN, Span
from cluster.tokenization import IncrementalDetokenizer, Tokenizer
from protos.speculation.v1 import target_pb2
from services.router.failover import run_anywhere
from services.router.replicas import ReplicaPool
from services.router.reply import Piece
from services.router.speculation_stats import SpeculationStats
from services.router.stop import StopMatcher, StopStrings

_FINISH_REASONS = {
    target_pb2.FINISH_REASON_UNSPECIFIED: None,
    target_pb2.FINISH_REASON_STOP: "stop",
    target_pb2.FINISH_REASON_LENGTH: "length",
}


async def generate(
    pool: ReplicaPool,
    request: target_pb2.GenerateRequest,
    *,
    stop_strings: StopStrings,
    skip_special_tokens: bool,
    tokenizer: Tokenizer,
    metrics: RouterMetrics,
    arrived_at: float,
    max_pause_seconds: float,
    span: Span = NO_SPAN,
) -> AsyncGenerator[Piece, None]:
    """Yields the pieces of one choice, whose request came in at `arrived_at` (time.perf_counter).

    A lost target is a pause of `max_pause_seconds` at most. Ends after a piece with a finish reason or with an
    OutriderError. Closing it frees the sequence.
    """
    writer = _Writer(IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens), stop_strings)
    stats = SpeculationStats()
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_later_tokens = 0
    running = run_anywhere(pool, request, max_pause_seconds, metrics.count_move, span)
    async with contextlib.aclosing(running) as replies:
        async for reply in replies:
            if reply.finish_reason not in _FINISH_REASONS:
                raise UnavailableError("the target worker ended the answer for a reason that this router does not know")
            if reply.token_ids:
                now = time.perf_counter()
                waited = None if last_token_at is None else now - last_token_at
                metrics.tokens.count_tokens(len(reply.token_ids), waited)
                if last_token_at is None:
                    first_token_at, num_later_tokens = now, -1
                    metrics.time_to_first_token.observe(now - arrived_at)
                    if request.choice_index == 0:  # choices of one prompt share it
                        metrics.prompt_tokens.inc(len(request.prompt_token_ids))
                last_token_at = now
                num_later_tokens += len(reply.token_ids)
            for counts in reply.rounds:
                metrics.tokens.count_round(*counts)
                stats.count_round(*counts)
            piece = writer.write(reply.token_ids, _FINISH_REASONS[reply.finish_reason])
            if piece.finish_reason is not None:
                metrics.e2e_latency.observe(time.perf_counter() - arrived_at)
                if first_token_at is not None and last_token_at is not None:
                    may_speculate = not (
                        request.HasField("num_speculative_tokens") and not request.num_speculative_tokens
                    )
                    metrics.count_decode(num_later_tokens, last_token_at - first_token_at, may_speculate=may_speculate)
                piece.speculation = stats
            yield piece
            if piece.finish_reason is not None:
                return


async def interleave(sequences: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Runs all `sequences` at once and yields their pieces as they come, each with the index of its sequence.

    The first error of one ends them all and is raised. Closing it closes them all.
    """
    if len(sequences) == 1:  # needs no task beside the caller's, which every stream of one choice would pay for
        async with contextlib.aclosing(sequences[0]) as pieces:
            async for piece in pieces:
                yield 0, piece
        return

    # Unread pieces pile up here and not in the target; there are at most `max_tokens` of a sequence.
    arrivals: asyncio.Queue[tuple[int, Piece] | asyncio.Task[None]] = asyncio.Queue()

    async def run(index: int, sequence: AsyncGenerator[Piece, None]) -> None:
        async with contextlib.aclosing(sequence) as pieces:
            async for piece in pieces:
                arrivals.put_nowait((index, piece))

    running = {asyncio.create_task(run(index, sequence)) for index, sequence in enumerate(sequences)}
    try:
        for task in running:
            task.add_done_callback(arrivals.put_nowait)
        while running:
            arrival = await arrivals.get()
            if isinstance(arrival, asyncio.Task):
                running.remove(arrival)
                arrival.result()  # raises what it ended with
            else:
                yield arrival
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class _Writer:
    """Writes the text of one sequence, as far as its first stop string."""

    def __init__(self, detokenizer: IncrementalDetokenizer, stop_strings: StopStrings) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop_strings) if stop_strings else None

    def write(self, token_ids: Sequence[int], finish_reason: str | None) -> Piece:
        """The piece that `token_ids` add, without those after the stop string; `finish_reason`: they are the last."""
        if self._matcher is None:
            text = self._detokenizer.push(token_ids)
            if finish_reason is not None:
                text += self._detokenizer.flush()
            return Piece(text, token_ids, finish_reason)
        # One by one: which token is the last must not depend on how many came at once.
        text = ""
        for num_tokens, token_id in enumerate(token_ids, start=1):
            text += self._matcher.push(self._detokenizer.push([token_id]))
            if self._matcher.has_stopped:
                return Piece(text, token_ids[:num_tokens], "stop")
        if finish_reason is not None:
            text += self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()
            if self._matcher.has_stopped:
                finish_reason = "stop"
        return Piece(text, token_ids, finish_reason)
