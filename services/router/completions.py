"""POST /v1/completions: check, tokenise, choose a target, generate, answer whole or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cluster.errors import OutriderError
from cluster.telemetry.metrics import RouterMetrics
from cluster.tokenization import Tokenizer
from services.router.body import read_json_object
from services.router.errors import ModelNotFoundError, envelope, excerpt
from services.router.generation import Piece, generate
from services.router.protocol import CompletionReply, CompletionRequest, Usage, parse_completion
from services.router.streaming import (
    DONE,
    EventStream,
    event,
    note_outcome,
    until_disconnected,
)
from services.router.targets import TargetPool
from services.router.validation import build_generate_request

# Longer prompts are tokenised in a thread (which holds no lock of the interpreter), so that streams go on.
_LONG_PROMPT_CHARACTERS = 16_384


class Completions:
    """The endpoint, with what it needs from the rest of the router."""

    def __init__(
        self,
        model_id: str,
        tokenizer: Tokenizer,
        pool: TargetPool,
        metrics: RouterMetrics,
        max_body_bytes: int,
    ) -> None:
        self._model_id = model_id
        self._tokenizer = tokenizer
        self._pool = pool
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes

    async def create(self, request: Request) -> Response:
        arrived_at = time.perf_counter()
        completion = parse_completion(await read_json_object(request, self._max_body_bytes))
        if completion.model not in (None, self._model_id):
            raise ModelNotFoundError(
                f"the model {excerpt(completion.model)} does not exist; this one is {self._model_id!r}",
                param="model",
            )
        target = self._pool.choose()
        assert target.description is not None
        seed = draw_seed() if completion.seed is None else completion.seed
        reply = CompletionReply(
            id=f"cmpl-{secrets.token_hex(16)}",
            created=int(time.time()),
            model=self._model_id,
            seed=seed,
            has_token_ids=completion.return_token_ids,
        )
        generate_request = build_generate_request(
            completion,
            request_id=reply.id,
            prompt_token_ids=await self._tokenize(completion),
            seed=seed,
            description=target.description,
        )
        num_prompt_tokens = len(generate_request.prompt_token_ids)
        pieces = generate(
            target,
            generate_request,
            tokenizer=self._tokenizer,
            metrics=self._metrics,
            arrived_at=arrived_at,
        )
        headers = {"x-outrider-seed": str(seed)}
        if completion.stream:
            events = _events(request, reply, pieces, num_prompt_tokens, completion.include_usage)
            return EventStream(events, headers)
        body = await until_disconnected(request.receive, _whole(reply, pieces, num_prompt_tokens))
        return JSONResponse(body, headers=headers)

    async def _tokenize(self, completion: CompletionRequest) -> list[int]:
        prompt = completion.prompt
        if isinstance(prompt, list):
            return prompt
        if len(prompt) > _LONG_PROMPT_CHARACTERS:
            return await asyncio.to_thread(self._tokenizer.encode, prompt)
        return self._tokenizer.encode(prompt)


def draw_seed() -> int:
    """A seed for a request that named none: of 53 bits, so that it survives a JavaScript client's JSON."""
    return secrets.randbits(53)


async def _whole(reply: CompletionReply, pieces: AsyncGenerator[Piece, None], num_prompt_tokens: int) -> dict[str, Any]:
    texts: list[str] = []
    token_ids: list[int] = []
    finish_reason: str | None = None
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            texts.append(piece.text)
            token_ids.extend(piece.token_ids)
            finish_reason = piece.finish_reason
    assert finish_reason is not None
    return reply.whole("".join(texts), token_ids, finish_reason, Usage(num_prompt_tokens, len(token_ids)))


async def _events(
    request: Request,
    reply: CompletionReply,
    pieces: AsyncGenerator[Piece, None],
    num_prompt_tokens: int,
    include_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """The server-sent events of a streamed answer. Raises only before the first."""
    num_tokens = 0
    started = False
    try:
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                num_tokens += len(piece.token_ids)
                if piece.text or piece.finish_reason or reply.has_token_ids:
                    yield event(reply.chunk(piece.text, piece.token_ids, piece.finish_reason, include_usage))
                    started = True
    except OutriderError as error:
        if not started:
            raise
        note_outcome(request.scope, error.http_status)
        yield event(envelope(error))
        return
    if include_usage:
        yield event(reply.usage_chunk(Usage(num_prompt_tokens, num_tokens)))
    yield DONE
