"""What both endpoints do: check, tokenise, generate every choice, answer whole or as a stream."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cluster.errors import OutriderError
from cluster.telemetry.metrics import RouterMetrics
from cluster.telemetry.tracing import Span
from cluster.tokenization import LONG_TEXT_CHARACTERS, Tokenizer
from services.router.api_request import ApiRequest, parse_request
from services.router.body import read_json_object
from services.router.errors import ModelNotFoundError, envelope, excerpt
from services.router.generation import generate, interleave
from services.router.replicas import ReplicaPool
from services.router.reply import Piece, Reply, Usage
from services.router.speculation_stats import SpeculationStats
from services.router.streaming import (
    DONE,
    EventStream,
    event,
    note_outcome,
    until_disconnected,
)
from services.router.switch import SpeculationSwitch
from services.router.tracing import AnswerTrace, span_of
from services.router.wire_requests import build_generate_requests

R = TypeVar("R", bound=ApiRequest)


@dataclass(frozen=True)
class Serving:
    """What is served, and what serving it takes."""

    model_id: str
    tokenizer: Tokenizer
    pool: ReplicaPool
    metrics: RouterMetrics
    switch: SpeculationSwitch
    max_body_bytes: int
    max_pause_seconds: float

    def check_model(self, model: str | None) -> None:
        """Raises ModelNotFoundError unless `model` is the one that is served, or left open."""
        if model not in (None, self.model_id):
            raise ModelNotFoundError(
                f"the model {excerpt(model)} does not exist; this one is {self.model_id!r}",
                param="model",
            )


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


class Endpoint(abc.ABC, Generic[R]):
    request_type: type[R]
    reply_type: ClassVar[type[Reply]]

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    @abc.abstractmethod
    def _encode(self, request: R) -> list[list[int]]:
        """The token IDs of each prompt of `request`."""

    async def create(self, http_request: Request) -> Response:
        """The answer to `http_request`. Raises OutriderError when there is none; then nothing is left running."""
        arrived_at = time.perf_counter()
        fields = await read_json_object(http_request, self._serving.max_body_bytes)
        request = parse_request(self.request_type, fields)
        self._serving.check_model(request.model)
        prompts = await self._tokenize(request)
        await self._serving.pool.wait_out_change()
        answer = self._start(request, prompts, arrived_at, span_of(http_request.scope))
        headers = {"x-outrider-seed": str(answer.reply.seed)}
        if request.stream:
            return EventStream(_events(http_request, answer), headers)
        body = await until_disconnected(http_request.receive, _whole(answer))
        return JSONResponse(body, headers=headers)

    async def _tokenize(self, request: R) -> list[list[int]]:
        if request.num_characters > LONG_TEXT_CHARACTERS:
            return await asyncio.to_thread(self._encode, request)
        return self._encode(request)

    def _start(self, request: R, prompts: list[list[int]], arrived_at: float, span: Span) -> _Answer:
        serving = self._serving
        reply = self.reply_type(
            id=f"{self.reply_type.id_prefix}-{secrets.token_hex(16)}",
            created=int(time.time()),
            model=serving.model_id,
            seed=draw_seed() if request.seed is None else request.seed,
            has_token_ids=request.return_token_ids,
            has_speculation_stats=request.return_speculation_stats,
            include_usage=request.include_usage,
            continuous_usage=request.continuous_usage,
        )
        limits = serving.pool.limits()
        prompts = [request.truncate(prompt, limits.max_model_len) for prompt in prompts]
        generate_requests = build_generate_requests(
            request, request_id=reply.id, prompts=prompts, seed=reply.seed, limits=limits
        )
        if not serving.switch.draw():
            for generate_request in generate_requests:
                generate_request.num_speculative_tokens = 0
        stop_strings = request.stop_strings
        sequences = [
            generate(
                serving.pool,
                generate_request,
                stop_strings=stop_strings,
                skip_special_tokens=request.skip_special_tokens,
                tokenizer=serving.tokenizer,
                metrics=serving.metrics,
                arrived_at=arrived_at,
                max_pause_seconds=serving.max_pause_seconds,
                span=span,
            )
            for generate_request in generate_requests
        ]
        if request.has_echo:
            decode = partial(serving.tokenizer.decode, skip_special_tokens=request.skip_special_tokens)
            texts = [decode(prompt) for prompt in prompts for _ in range(request.n)]
            sequences = [_echoed(text, pieces) for text, pieces in zip(texts, sequences, strict=True)]
        prompt_lens = [len(prompt) for prompt in prompts]
        trace = AnswerTrace(span, arrived_at)
        trace.describe(request, serving.model_id, reply.id, reply.seed, sum(prompt_lens))
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
    choices = [
        Piece(
            text="".join(piece.text for piece in pieces),
            token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
            finish_reason=pieces[-1].finish_reason,
            speculation=pieces[-1].speculation,
        )
        for pieces in pieces_of
    ]
    num_tokens = sum(len(choice.token_ids) for choice in choices)
    return answer.reply.whole(choices, Usage(answer.num_prompt_tokens, num_tokens))


async def _events(http_request: Request, answer: _Answer) -> AsyncGenerator[bytes, None]:
    """The server-sent events of a streamed answer. Raises only before the first."""
    reply = answer.reply
    num_tokens = [0] * answer.num_choices
    speculation: SpeculationStats | None = None  # of the only choice
    started: set[int] = set()  # choices
    is_sent = False
    try:
        async with contextlib.aclosing(answer.pieces) as pieces:
            async for index, piece in pieces:
                num_tokens[index] += len(piece.token_ids)
                if answer.num_choices == 1:
                    speculation = piece.speculation
                usage = Usage(answer.prompt_len(index), num_tokens[index]) if reply.continuous_usage else None
                for chunk in reply.chunks(index, piece, usage, is_first=index not in started):
                    yield event(chunk)
                    is_sent = True
                started.add(index)
    except OutriderError as error:
        if not is_sent:
            raise
        note_outcome(http_request.scope, error.http_status)
        yield event(envelope(error))
        return
    if reply.include_usage:
        yield event(reply.usage_chunk(Usage(answer.num_prompt_tokens, sum(num_tokens)), speculation))
    yield DONE
