"""What both endpoints do: check, tokenise, generate every choice, answer whole or as a stream."""

from __future__ import annotations

import abc
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cluster.constraints import Grammar
from cluster.tokenization import Tokenizer
from services.router.access.access_log import RequestRecord, record_of
from services.router.api.reply import Piece, Reply, Usage, merged
from services.router.api.request import ApiRequest, parse_request
from services.router.errors import ModelNotFoundError, excerpt
from services.router.http.body import read_json_body, to_json_object
from services.router.http.large_work import run_in_thread_if_large
from services.router.http.middleware import request_id_of
from services.router.http.streaming import EventStream, until_disconnected
from services.router.metrics import RouterMetrics
from services.router.operators.switch import SpeculationSwitch
from services.router.operators.traffic_log import TrafficLog
from services.router.output.generation import TextFormat, generate, interleave
from services.router.output.logprobs import LogprobsFormat
from services.router.output.message import Reader
from services.router.output.speculation_stats import SpeculationStats
from services.router.page.feed import Feed
from services.router.targets.prompt_budget import PromptBudget, StartWindow
from services.router.targets.replicas import AdapterRef, ReplicaPool
from services.router.targets.wire_requests import build_choice_requests, check_prompt
from services.router.tracing import AnswerTrace, span_of

R = TypeVar("R", bound=ApiRequest)


@dataclass(frozen=True)
class Serving:
    """What is served, and what serving it takes."""

    model_id: str
    tokenizer: Tokenizer
    pool: ReplicaPool
    metrics: RouterMetrics
    feed: Feed
    switch: SpeculationSwitch
    budget: PromptBudget
    max_body_bytes: int
    max_pause_seconds: float
    traffic: TrafficLog | None  # None: no prompt is kept
    sampling_defaults: Mapping[str, Any]  # fields of requests that leave them open

    def with_defaults(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns the `fields` of a request with the defaults of those that it leaves open."""
        return {**self.sampling_defaults, **{name: value for name, value in fields.items() if value is not None}}

    def check_model(self, model: str | None) -> AdapterRef | None:
        """The adapter that `model` names; None: the model that is served, which leaving it open means too.

        Raises ModelNotFoundError, or UnavailableError for an adapter that only targets have which cannot answer now.
        """
        if model in (None, self.model_id):
            return None
        adapter = self.pool.adapters().get(model)
        if adapter is None and self.pool.knows(model):
            raise self.pool.nobody()
        if adapter is None:
            raise ModelNotFoundError(
                f"the model {excerpt(model)} does not exist; this one is {self.model_id!r}",
                param="model",
            )
        return adapter


@dataclass(frozen=True)
class _Answer:
    """An answer on its way."""

    reply: Reply
    pieces: AsyncGenerator[tuple[int, Piece], None]
    num_choices: int
    prompt_lens: Sequence[int]  # of each prompt; its choices share it

    @property
    def num_prompt_tokens(self) -> int:
        return sum(self.prompt_lens)

    def prompt_len(self, index: int) -> int:
        """Of the prompt that choice `index` has."""
        return self.prompt_lens[index * len(self.prompt_lens) // self.num_choices]

    def num_cached_tokens(self, index: int, choice: Piece) -> int:
        """Returns the cached tokens of the prompt of `choice`; choices that share a prompt report them on the first."""
        return choice.num_cached_tokens if index * len(self.prompt_lens) % self.num_choices == 0 else 0


class ApiEndpoint(abc.ABC, Generic[R]):
    request_type: type[R]
    reply_type: ClassVar[type[Reply]]

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    @abc.abstractmethod
    def _encode(self, request: R) -> list[list[int]]:
        """The token IDs of each prompt of `request`."""

    def _parse(self, fields: dict[str, Any]) -> R:
        """The request that the body `fields` makes. Raises InvalidRequestError naming the field."""
        return parse_request(self.request_type, fields)

    def _reader(self, request: R, prompt: list[int]) -> Reader | None:
        """Returns how answers to `prompt` are read; None: all of an answer is content."""
        return None

    def _grammar(self, request: R, reader: Reader | None) -> Grammar | None:
        """Returns what the text of an answer has to be."""
        return request.grammar

    def _reply(self, request: R, reader: Reader | None, **frame: Any) -> Reply:
        """Returns the reply to `request`; `frame`: the fields that every reply has."""
        return self.reply_type(**frame)

    def _shown_special_tokens(self, request: R) -> Collection[int]:
        """Special tokens that are needed to read the answer, and so are not left out of its text."""
        return ()

    def _turn_end_ids(self, request: R) -> frozenset[int]:
        """Returns the tokens that end an answer to `request` in addition to the model's end tokens."""
        return frozenset()

    async def create(self, http_request: Request) -> Response:
        """The answer to `http_request`. Raises OutriderError when there is none; then nothing is left running."""
        scope = http_request.scope
        record, trace = record_of(scope), AnswerTrace(span_of(scope), time.perf_counter())
        body = await read_json_body(http_request, self._serving.max_body_bytes)
        request = await run_in_thread_if_large(
            len(body), lambda: self._parse(self._serving.with_defaults(to_json_object(body)))
        )
        if request.model not in (None, self._serving.model_id):  # what adapters there are, only targets know
            await self._serving.pool.wait_out_change()
        adapter = self._serving.check_model(request.model)
        prompts = await run_in_thread_if_large(len(body), lambda: self._encode(request))
        self._serving.budget.take(scope, sum(map(len, prompts)), request.prompt_field)
        await self._serving.pool.wait_out_change()
        limits = self._serving.pool.limits()
        prompts = [request.truncate(prompt, limits.max_model_len) for prompt in prompts]
        echoes = await run_in_thread_if_large(len(body), lambda: self._echoes(request, prompts, limits.vocab_size))
        answer = self._start(request, prompts, echoes, request_id_of(scope), record, trace, adapter)
        headers = {"x-outrider-seed": str(answer.reply.seed)}
        if request.stream:
            return EventStream(_events(answer), headers, answer.reply.failure)
        whole = await until_disconnected(http_request.receive, _whole(answer))
        return JSONResponse(whole, headers=headers)

    def _echoes(self, request: R, prompts: list[list[int]], vocab_size: int) -> list[str]:
        """What the choices begin with, of each prompt. Raises InvalidRequestError for tokens that spell nothing."""
        if not request.has_echo:
            return []
        for prompt in prompts:
            check_prompt(prompt, vocab_size, request.prompt_field)
        decode = self._serving.tokenizer.decode
        return [decode(prompt, skip_special_tokens=request.skip_special_tokens) for prompt in prompts]

    def _start(
        self,
        request: R,
        prompts: list[list[int]],
        echoes: list[str],
        request_id: str,
        record: RequestRecord,
        trace: AnswerTrace,
        adapter: AdapterRef | None = None,
    ) -> _Answer:
        serving = self._serving
        model = serving.model_id if adapter is None else adapter.name
        if adapter is not None:
            serving.metrics.count_adapter(adapter.name)
        limits = serving.pool.limits()
        reader = self._reader(request, prompts[0])
        reply = self._reply(
            request,
            reader,
            id=f"{self.reply_type.id_prefix}{request.request_id or request_id}",
            created=int(time.time()),
            model=model,
            seed=draw_seed() if request.seed is None else request.seed,
            has_token_ids=request.return_token_ids,
            has_rounds=request.return_rounds,
            has_speculation_stats=request.return_speculation_stats,
            include_usage=request.include_usage,
            continuous_usage=request.continuous_usage,
            logprobs=LogprobsFormat(serving.tokenizer, request.return_tokens_as_token_ids),
            has_echo=request.has_echo,
            num_logprobs=request.num_logprobs or 0,
            num_prompt_logprobs=request.prompt_logprobs,
            system_fingerprint=limits.fingerprint,
        )
        turn_end_ids = self._turn_end_ids(request)
        choice_requests = build_choice_requests(
            request,
            request_id=reply.id,
            prompts=prompts,
            seed=reply.seed,
            limits=limits,
            tokenizer=serving.tokenizer,
            grammar=self._grammar(request, reader),
            turn_end_ids=turn_end_ids,
            adapter=adapter,
            may_speculate=serving.switch.draw(),
        )
        if serving.traffic is not None:
            serving.traffic.add(prompts)
        stop_token_ids = frozenset(request.stop_token_ids)
        end_token_ids = stop_token_ids | turn_end_ids | limits.eos_token_ids
        text_format = TextFormat(
            serving.tokenizer,
            request.stop_strings,
            request.skip_special_tokens,
            frozenset() if request.include_stop_str_in_output else end_token_ids,
            stop_token_ids,
            request.min_tokens,
            has_no_tokens=request.token_limit[1] == 0,
            shown_special_tokens=self._shown_special_tokens(request),
            tells_rounds=request.return_rounds,
            reader=reader,
        )
        window = StartWindow()
        sequences = [
            generate(
                serving.pool,
                choice_request,
                text_format,
                metrics=serving.metrics,
                feed=serving.feed,
                record=record,
                max_pause_seconds=serving.max_pause_seconds,
                window=window,
                counts_prompt=index % request.n == 0,
                span=trace.span,
            )
            for index, choice_request in enumerate(choice_requests)
        ]
        if request.has_echo:
            texts = [text for text in echoes for _ in range(request.n)]
            sequences = [_echoed(text, pieces) for text, pieces in zip(texts, sequences, strict=True)]
        prompt_lens = [len(prompt) for prompt in prompts]
        trace.describe(request, model, reply.id, reply.seed, sum(prompt_lens))
        record.id, record.model, record.seed, record.stream = reply.id, serving.model_id, reply.seed, request.stream
        record.adapter = None if adapter is None else adapter.name
        record.num_choices, record.num_prompt_tokens = len(sequences), sum(prompt_lens)
        sequences = [trace.follow(index, sequence) for index, sequence in enumerate(sequences)]
        return _Answer(reply, interleave(sequences), len(sequences), prompt_lens)


async def _echoed(prompt: str, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[Piece, None]:
    """`pieces`, the first of which begins with the prompt."""
    text = prompt
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            piece.text, text = text + piece.text, ""
            yield piece


def draw_seed() -> int:
    """A seed for a request that named none: of 53 bits, so that it survives a JavaScript client's JSON."""
    return secrets.randbits(53)


async def _whole(answer: _Answer) -> dict[str, Any]:
    pieces_of: list[list[Piece]] = [[] for _ in range(answer.num_choices)]
    async with contextlib.aclosing(answer.pieces) as pieces:
        async for index, piece in pieces:
            pieces_of[index].append(piece)
    choices = [merged(pieces) for pieces in pieces_of]
    num_tokens = sum(len(choice.token_ids) for choice in choices)
    num_cached_tokens = sum(answer.num_cached_tokens(index, choice) for index, choice in enumerate(choices))
    num_reasoning_tokens = sum(choice.num_reasoning_tokens for choice in choices)
    usage = Usage(answer.num_prompt_tokens, num_tokens, num_cached_tokens, num_reasoning_tokens)
    return answer.reply.whole(choices, usage)


async def _events(answer: _Answer) -> AsyncGenerator[bytes, None]:
    """Yields the server-sent events of a streamed answer. Raises OutriderError if the answer fails."""
    reply = answer.reply
    num_tokens, num_cached_tokens, num_reasoning_tokens = ([0] * answer.num_choices for _ in range(3))
    speculation: SpeculationStats | None = None  # of the only choice
    started: set[int] = set()  # choices
    async with contextlib.aclosing(answer.pieces) as pieces:
        async for index, piece in pieces:
            num_tokens[index] += len(piece.token_ids)
            num_cached_tokens[index] += answer.num_cached_tokens(index, piece)
            num_reasoning_tokens[index] += piece.num_reasoning_tokens
            if answer.num_choices == 1:
                speculation = piece.speculation
            usage = None
            if reply.continuous_usage:
                counts = num_tokens[index], num_cached_tokens[index], num_reasoning_tokens[index]
                usage = Usage(answer.prompt_len(index), *counts)
            for chunk in reply.chunks(index, piece, usage, is_first=index not in started):
                yield reply.event(chunk)
            started.add(index)
    counts = sum(num_tokens), sum(num_cached_tokens), sum(num_reasoning_tokens)
    for last in reply.ending(Usage(answer.num_prompt_tokens, *counts), speculation):
        yield last
