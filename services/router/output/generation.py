"""Runs sequences on targets: token IDs come back, pieces of text go out, and what happened is counted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass

from cluster.errors import UnavailableError
from cluster.logprobs import TokenLogprobs
from cluster.telemetry.tracing import NO_SPAN, Span
from cluster.tokenization import IncrementalDetokenizer, Tokenizer
from cluster.wire.replies import UNFINISHED, RoundCounts
from protos.speculation.v1 import target_pb2
from services.router.access.access_log import RequestRecord
from services.router.access.caller import current_key
from services.router.api.reply import Piece, Prompt
from services.router.http.large_work import run_in_thread_if_large
from services.router.metrics import RouterMetrics
from services.router.output.accepted_drafts import answer_rounds
from services.router.output.message import Reader
from services.router.output.source import Said
from services.router.output.speculation_stats import SpeculationStats
from services.router.output.stop import StopMatcher, StopStrings
from services.router.page.feed import Feed
from services.router.targets.failover import run_anywhere
from services.router.targets.prompt_budget import StartWindow
from services.router.targets.replicas import ReplicaPool
from services.router.targets.wire_requests import ChoiceRequest

_FINISH_REASONS = {
    target_pb2.FINISH_REASON_UNSPECIFIED: None,
    target_pb2.FINISH_REASON_STOP: "stop",
    target_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True)
class TextFormat:
    """How the tokens of a choice become text."""

    tokenizer: Tokenizer
    stop_strings: StopStrings
    skip_special_tokens: bool
    end_token_ids: frozenset[int]  # those that end a sequence, and are no part of its text
    stop_token_ids: frozenset[int]  # those of them that the request named
    min_tokens: int = 0  # in which no stop string is looked for
    has_no_tokens: bool = False  # the only token is not wanted
    shown_special_tokens: Collection[int] = ()  # even where others are skipped
    tells_rounds: bool = False  # pieces say which step added which token
    reader: Reader | None = None  # of a chat whose answers have reasoning or calls


async def generate(
    pool: ReplicaPool,
    request: ChoiceRequest,
    text: TextFormat,
    *,
    metrics: RouterMetrics,
    feed: Feed,
    record: RequestRecord,
    max_pause_seconds: float,
    window: StartWindow,
    counts_prompt: bool = True,
    span: Span = NO_SPAN,
) -> AsyncGenerator[Piece, None]:
    """Yields the pieces of one choice; `record` is told what becomes of it.

    It begins when it has a place in `window`. A lost target is a pause of `max_pause_seconds` at most. `counts_prompt`:
    one of the choices that share a prompt has it counted. Ends after a piece with a finish reason or with an
    OutriderError. Closing it frees the sequence.
    """
    writer, prompt_logprobs = _Writer(text), TokenLogprobs(request.num_prompt_logprobs or 0)
    stats = SpeculationStats()
    key, choice = current_key.get(), feed.new_choice()
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_later_tokens = 0

    def count_move(reason: str) -> None:
        metrics.count_move(reason)
        record.num_moves += 1

    running = run_anywhere(pool, request, max_pause_seconds, count_move, span, lambda: window.has_begun)
    async with window.place(request.num_tokens) as place, contextlib.aclosing(running) as replies:
        async for reply in replies:
            if reply.finish_reason not in _FINISH_REASONS:
                raise UnavailableError("the target worker ended the answer for a reason that this router does not know")
            if reply.prompt_logprobs is not None:
                prompt_logprobs.extend(reply.prompt_logprobs)
                if not reply.token_ids:
                    continue
            if reply.token_ids:
                now = time.perf_counter()
                waited = None if last_token_at is None else now - last_token_at
                metrics.tokens.count_tokens(len(reply.token_ids), waited)
                record.count_tokens(len(reply.token_ids), now)
                if key is not None:
                    metrics.keys.count_generated(key, len(reply.token_ids))
                if last_token_at is None:
                    first_token_at, num_later_tokens = now, -1
                    place.begin()
                    metrics.time_to_first_token.observe(now - record.arrived_at)
                    if counts_prompt:
                        metrics.prompt_tokens.inc(len(request.prompt_token_ids))
                        if key is not None:
                            metrics.keys.count_prompt(key, len(request.prompt_token_ids))
                last_token_at = now
                num_later_tokens += len(reply.token_ids)
            for num_draft_tokens, num_accepted_tokens, _ in reply.rounds:
                metrics.tokens.count_round(num_draft_tokens, num_accepted_tokens)
                record.count_round(num_draft_tokens, num_accepted_tokens)
                stats.count_round(num_draft_tokens, num_accepted_tokens)
            if feed.is_watched:
                feed.note(choice, len(reply.token_ids), reply.rounds, has_ended=reply.finish_reason != UNFINISHED)
            is_first = not writer.num_tokens
            finish_reason = _FINISH_REASONS[reply.finish_reason]
            piece = writer.write(reply.token_ids, finish_reason, reply.logprobs, reply.rounds)
            if is_first and reply.token_ids:
                piece.num_cached_tokens = min(reply.num_cached_tokens, len(request.prompt_token_ids))
                if request.num_prompt_logprobs is not None:
                    piece.prompt = Prompt(request.prompt_token_ids, prompt_logprobs)
            if piece.finish_reason is not None:
                piece.num_reasoning_tokens = await writer.num_reasoning_tokens()
                record.finish_reasons[piece.finish_reason] += 1
                metrics.e2e_latency.observe(time.perf_counter() - record.arrived_at)
                if first_token_at is not None and last_token_at is not None:
                    seconds = last_token_at - first_token_at
                    metrics.count_decode(num_later_tokens, seconds, may_speculate=request.may_speculate)
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

    def __init__(self, form: TextFormat) -> None:
        self.num_tokens = 0
        self._form = form
        self._detokenizer = IncrementalDetokenizer(
            form.tokenizer, skip_special_tokens=form.skip_special_tokens, shown=form.shown_special_tokens
        )
        self._matcher = StopMatcher(form.stop_strings) if form.stop_strings else None
        self._reader = form.reader.start() if form.reader is not None else None
        self._texts: list[str] = []  # of the tokens of the last piece, where their rounds are told

    def write(
        self,
        token_ids: Sequence[int],
        finish_reason: str | None,
        logprobs: TokenLogprobs | None,
        rounds: Sequence[RoundCounts] = (),
    ) -> Piece:
        """The piece that `token_ids` add, without those after the stop string; `finish_reason`: they are the last."""
        if self._form.has_no_tokens:
            self.num_tokens += len(token_ids)
            return Piece("", (), "length", logprobs=None if logprobs is None else logprobs.part(0, 0))
        spelled: Sequence[int] = token_ids
        if finish_reason == "stop" and token_ids and token_ids[-1] in self._form.end_token_ids:
            spelled = token_ids[:-1]
        piece = self._plain(spelled, finish_reason) if self._matcher is None else self._matched(spelled, finish_reason)
        if len(piece.token_ids) == len(spelled):
            piece.token_ids = token_ids
            if finish_reason == "stop" and token_ids and token_ids[-1] in self._form.stop_token_ids:
                piece.stop_reason = piece.stop_reason or token_ids[-1]
        if logprobs is not None:
            piece.logprobs = logprobs.part(0, len(piece.token_ids))
        if self._form.tells_rounds:
            unspelled = [""] * (len(piece.token_ids) - len(self._texts))
            piece.rounds = list(answer_rounds([*self._texts, *unspelled], rounds))
        self.num_tokens += len(piece.token_ids)
        return piece

    async def num_reasoning_tokens(self) -> int:
        """Returns the number of tokens of the reasoning's text, at most those of the answer."""
        text = "" if self._reader is None else self._reader.reasoning_text
        if not text:
            return 0
        token_ids = await run_in_thread_if_large(
            len(text), lambda: self._form.tokenizer.encode(text, add_special_tokens=False)
        )
        return min(len(token_ids), self.num_tokens)

    def _plain(self, token_ids: Sequence[int], finish_reason: str | None) -> Piece:
        if self._form.tells_rounds:
            self._texts = [self._detokenizer.push([token_id]) for token_id in token_ids]
            text = "".join(self._texts)
        else:
            text = self._detokenizer.push(token_ids)
        if finish_reason is not None:
            text += self._flush()
        if self._reader is None:
            return Piece(text, token_ids, finish_reason)
        said = self._reader.push(text, is_last=finish_reason is not None)
        return Piece("", token_ids, finish_reason, said=said)

    def _flush(self) -> str:
        rest = self._detokenizer.flush()
        if self._texts:
            self._texts[-1] += rest
        return rest

    def _matched(self, token_ids: Sequence[int], finish_reason: str | None) -> Piece:
        # One by one: which token is the last must not depend on how many came at once.
        assert self._matcher is not None
        said, self._texts = list[Said](), []
        for num_tokens, token_id in enumerate(token_ids, start=1):
            spelled = self._detokenizer.push([token_id])
            self._texts.append(spelled)
            own = self._read(spelled)
            said += own if self.num_tokens + num_tokens <= self._form.min_tokens else self._cut(own)
            if self._matcher.stopped_at is not None:
                return self._piece(said, token_ids[:num_tokens], "stop")
        if finish_reason is not None:
            said += self._cut(self._read(self._flush(), is_last=True))
            said.append(Said("content", self._matcher.flush()))
        return self._piece(said, token_ids, finish_reason if self._matcher.stopped_at is None else "stop")

    def _read(self, text: str, *, is_last: bool = False) -> list[Said]:
        if self._reader is None:
            return [Said("content", text)]
        return self._reader.push(text, is_last=is_last)

    def _cut(self, said: Sequence[Said]) -> list[Said]:
        """Returns `said` without the content that may be part of a stop string, and without what follows one."""
        assert self._matcher is not None
        held = "" if self._reader is None else self._reader.held_content
        kept: list[Said] = []
        for one in said:
            if one.kind != "content":
                kept += [Said("content", self._matcher.flush()), one]
                continue
            kept.append(Said("content", self._matcher.push(one.text)))
            if self._matcher.stopped_at is not None:
                return kept
        if held and self._matcher.would_stop(held):
            kept.append(Said("content", self._matcher.push(held)))
        return kept

    def _piece(self, said: Sequence[Said], token_ids: Sequence[int], finish_reason: str | None) -> Piece:
        assert self._matcher is not None
        text = "".join(one.text for one in said) if self._reader is None else ""
        kept = () if self._reader is None else [one for one in said if one.text or one.kind != "content"]
        return Piece(text, token_ids, finish_reason, stop_reason=self._matcher.stopped_at, said=kept)
