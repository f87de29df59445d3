"""Generates choices: converts the token IDs of a target to pieces for the client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from cluster.errors import UnavailableError
from cluster.logprobs import TokenLogprobs
from services.router.api.observer import ChoiceObserver
from services.router.output.piece import Piece, Prompt
from services.router.output.writer import ChoiceWriter
from services.router.targets.call_span import FINISH_REASONS
from services.router.targets.choice_request import ChoiceRequest
from services.router.targets.failover import run_anywhere
from services.router.targets.prompt_budget import StartWindow
from services.router.targets.replicas import ReplicaPool

_BEGUN_TOGETHER = 8  # choices that begin in a turn of the event loop; each computes for up to 0.5 ms


async def generate(
    pool: ReplicaPool,
    request: ChoiceRequest,
    writer: ChoiceWriter,
    observer: ChoiceObserver,
    window: StartWindow,
    max_pause_seconds: float,
) -> AsyncGenerator[Piece, None]:
    """Yields the pieces of one choice, which starts when it has a place in `window`.

    If its target is lost, another one continues it, for which it waits up to `max_pause_seconds`. Ends after a piece
    with a finish reason, or raises OutriderError. Closing the generator frees the sequence on its target.
    """
    prompt_logprobs = TokenLogprobs(request.num_prompt_logprobs or 0)
    running = run_anywhere(pool, request, max_pause_seconds, observer, lambda: window.has_begun)
    with observer:
        async with window.place(request.num_tokens) as place, contextlib.aclosing(running) as replies:
            async for reply in replies:
                if reply.finish_reason not in FINISH_REASONS:
                    raise UnavailableError("the target worker ended the answer for an unknown reason")
                if reply.prompt_logprobs is not None:
                    prompt_logprobs.extend(reply.prompt_logprobs)
                    if not reply.token_ids:
                        continue
                observer.received(reply)
                is_first = bool(reply.token_ids) and not writer.num_tokens
                finish_reason = FINISH_REASONS[reply.finish_reason]
                piece = writer.write(reply.token_ids, finish_reason, reply.logprobs, reply.rounds)
                if writer.echo:
                    piece.text, writer.echo = writer.echo + piece.text, ""
                if is_first:
                    place.begin()
                    piece.num_cached_tokens = min(reply.num_cached_tokens, len(request.prompt_token_ids))
                    if request.num_prompt_logprobs is not None:
                        piece.prompt = Prompt(request.prompt_token_ids, prompt_logprobs)
                if piece.finish_reason is not None:
                    piece.num_reasoning_tokens = await writer.num_reasoning_tokens()
                    piece.speculation = observer.speculation
                observer.wrote(piece)
                yield piece
                if piece.finish_reason is not None:
                    return


async def interleave(sequences: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Runs all `sequences` at once and yields their pieces as they come.

    Each piece comes with the index of its sequence. The first error in any sequence ends all of them and is raised.
    Closing the generator closes all of them.
    """
    if len(sequences) == 1:  # saves most streams the cost of a separate task
        async with contextlib.aclosing(sequences[0]) as pieces:
            async for piece in pieces:
                yield 0, piece
        return

    # Unread pieces queue up here, not in the target; their number is bounded by `max_tokens`.
    arrivals: asyncio.Queue[tuple[int, Piece] | asyncio.Task[None]] = asyncio.Queue()

    async def run(index: int, sequence: AsyncGenerator[Piece, None]) -> None:
        async with contextlib.aclosing(sequence) as pieces:
            async for piece in pieces:
                arrivals.put_nowait((index, piece))

    running: set[asyncio.Task[None]] = set()
    try:
        for index, sequence in enumerate(sequences):
            running.add(task := asyncio.create_task(run(index, sequence)))
            task.add_done_callback(arrivals.put_nowait)
            if index % _BEGUN_TOGETHER == _BEGUN_TOGETHER - 1:
                await asyncio.sleep(0)  # other streams go on
        while running:
            arrival = await arrivals.get()
            if isinstance(arrival, asyncio.Task):
                running.remove(arrival)
                arrival.result()  # raises the exception that it ended with
            else:
                yield arrival
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
