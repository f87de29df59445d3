"""Observes one answer for everything that reports on it: metrics, API keys, access log, trace and page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from starlette.types import Scope

from cluster.errors import OverloadedError
from cluster.wire.replies import UNFINISHED, CallReply
from services.router.access.access_log import record_of
from services.router.api.reply import Reply
from services.router.api.request import ApiRequest
from services.router.api.trace import AnswerTrace
from services.router.http.current_key import current_key
from services.router.http.tracing import span_of
from services.router.metrics import RouterMetrics
from services.router.output.message import Reader
from services.router.output.piece import Piece
from services.router.output.speculation_stats import SpeculationStats
from services.router.page.feed import Feed
from services.router.targets.choice_request import ChoiceRequest
from services.router.targets.replicas import AdapterRef


class AnswerObserver:
    """Observes the answer to the HTTP request of `scope`."""

    def __init__(self, scope: Scope, metrics: RouterMetrics, feed: Feed) -> None:
        self.metrics = metrics
        self.feed = feed
        self.key = current_key.get()  # name of the API key; None: the router has no keys
        self.record = record_of(scope)
        self.trace = AnswerTrace(span_of(scope), time.perf_counter())
        self.reads_calls = False  # whether answers are parsed for tool calls
        self.request_type = ""
        self.has_failed = False  # whether a choice has failed, which ends the others

    def begin(
        self,
        request: ApiRequest,
        reply: Reply,
        model: str,
        adapter: AdapterRef | None,
        prompt_lens: Sequence[int],
        reader: Reader | None,
    ) -> None:
        """Records that the request is valid and about to be sent to targets. `model`: the served base model."""
        if adapter is not None:
            self.metrics.count_adapter(adapter.name)
            self.record.adapter = adapter.name
        self.metrics.request_params_n.observe(request.n)
        self.reads_calls = reader is not None and reader.reads_calls
        self.request_type = reply.request_type
        num_prompt_tokens = sum(prompt_lens)
        self.trace.describe(request, reply.model, reply.id, reply.seed, num_prompt_tokens)
        record = self.record
        record.id, record.model, record.seed, record.stream = reply.id, model, reply.seed, request.stream
        record.num_choices, record.num_prompt_tokens = request.n * len(prompt_lens), num_prompt_tokens


class ChoiceObserver:
    """Observes one choice of an answer; entered while the choice runs."""

    def __init__(self, answer: AnswerObserver, request: ChoiceRequest, *, counts_prompt: bool) -> None:
        """`counts_prompt`: whether to count the prompt's tokens.

        True for exactly one of the choices that share a prompt.
        """
        self.span = answer.trace.span
        self.speculation = SpeculationStats()
        self._answer = answer
        self._request = request
        self._counts_prompt = counts_prompt
        self._number_on_page = answer.feed.new_choice()
        self._num_tokens = 0
        self._num_predicted_tokens = 0
        self._has_call = False
        self._finish_reason: str | None = None
        self._first_token_at = self._last_token_at = 0.0

    def __enter__(self) -> ChoiceObserver:
        metrics, adapter = self._answer.metrics, self._request.template.adapter
        metrics.request_params_max_tokens.observe(self._request.max_tokens)
        if adapter:
            metrics.count_running_adapter(adapter, 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        metrics, adapter = self._answer.metrics, self._request.template.adapter
        if adapter:
            metrics.count_running_adapter(adapter, -1)
        if (
            isinstance(error, OverloadedError) and not self._answer.has_failed
        ):  # counts a request once, not each of its choices
            metrics.count_rejection("max_num_queued_reqs")
        self._answer.has_failed |= isinstance(error, Exception)
        ended_as = self._finish_reason or ("error" if self._answer.has_failed else "abort")
        metrics.count_end(ended_as, len(self._request.prompt_token_ids), self._num_tokens)
        self._answer.trace.end()

    def sent(self, num_predicted_tokens: int) -> None:
        """Records that the request is sent to a target.

        `num_predicted_tokens`: prompt tokens that are expected in the target's prefix cache.
        """
        self._num_predicted_tokens = num_predicted_tokens

    def moved(self, reason: str) -> None:
        """Records that another target continues the choice. `reason`: what happened to the previous one."""
        self._answer.metrics.count_move(reason)
        self._answer.record.num_moves += 1

    def received(self, reply: CallReply) -> None:
        """Records that a target sent `reply`."""
        answer = self._answer
        if reply.token_ids:
            self._count_tokens(len(reply.token_ids), reply.num_cached_tokens)
        for num_draft_tokens, num_accepted_tokens, _ in reply.rounds:
            answer.metrics.tokens.count_round(num_draft_tokens, num_accepted_tokens)
            answer.record.count_round(num_draft_tokens, num_accepted_tokens)
            self.speculation.count_round(num_draft_tokens, num_accepted_tokens)
        if answer.feed.is_watched:
            has_ended = reply.finish_reason != UNFINISHED
            answer.feed.note(self._number_on_page, len(reply.token_ids), reply.rounds, has_ended=has_ended)

    def _count_tokens(self, count: int, num_cached_tokens: int) -> None:
        answer, now, is_first = self._answer, time.perf_counter(), not self._num_tokens
        answer.metrics.tokens.count_tokens(count, None if is_first else now - self._last_token_at)
        answer.record.count_tokens(count, now)
        if answer.key is not None:
            answer.metrics.keys.count_generated(answer.key, count)
        if is_first:
            self._first_token_at = now
            answer.metrics.time_to_first_token.observe(now - answer.record.arrived_at)
            if self._counts_prompt:
                num_prompt_tokens = len(self._request.prompt_token_ids)
                num_cached_tokens = min(num_cached_tokens, num_prompt_tokens)
                answer.metrics.count_prompt(num_prompt_tokens, num_cached_tokens, self._num_predicted_tokens)
                if answer.key is not None:
                    answer.metrics.keys.count_prompt(answer.key, num_prompt_tokens)
        self._last_token_at = now
        self._num_tokens += count

    def wrote(self, piece: Piece) -> None:
        """Records that `piece` is about to be sent to the client."""
        answer = self._answer
        if self.span.is_recorded:
            answer.trace.note(self._request.choice_index, piece)
        if answer.reads_calls:
            self._has_call |= any(said.kind == "call" for said in piece.said)
        if piece.finish_reason is None:
            return
        if answer.reads_calls:
            is_streamed = bool(answer.record.stream)
            answer.metrics.count_parsed(answer.request_type, is_streamed=is_streamed, has_call=self._has_call)
        self._finish_reason = piece.finish_reason
        answer.record.finish_reasons[piece.finish_reason] += 1
        answer.metrics.e2e_latency.observe(time.perf_counter() - answer.record.arrived_at)
        if self._num_tokens:
            seconds = self._last_token_at - self._first_token_at
            answer.metrics.count_decode(self._num_tokens - 1, seconds, may_speculate=self._request.may_speculate)
