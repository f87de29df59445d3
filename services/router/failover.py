"""Runs a sequence to its end wherever it can run: what one worker leaves unfinished, another goes on with.

A worker that takes it over gets the prompt with all tokens so far, the seed and the choice. As noise depends on seed
and position alone, and penalties on the tokens, the answer goes on as it would have; the client sees a pause.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

from cluster.errors import InternalError, UnavailableError
from cluster.telemetry.tracing import NO_SPAN, Span
from cluster.wire.replies import UNFINISHED, CallReply
from protos.speculation.v1 import target_pb2
from services.router.replicas import ReplicaLostError, ReplicaPool
from services.router.tracing import CallSpan

logger = logging.getLogger(__name__)

_MAX_DEATHS = 2  # of workers in a row that had it and yielded no token of it: it may be what they died of
_MAX_MOVES = 32


async def run_anywhere(
    pool: ReplicaPool,
    request: target_pb2.GenerateRequest,
    max_pause_seconds: float,
    count_move: Callable[[str], None],
    span: Span = NO_SPAN,
) -> AsyncGenerator[CallReply, None]:
    """Yields the replies to `request` up to one with a finish reason. Closing it frees the sequence.

    `span` is that of the HTTP request: each call on a worker is one below it.

    Waits up to `max_pause_seconds` for a worker that can go on: once there are tokens, one that answers alike. Tells
    `count_move` why the last one could not.
    Raises OutriderError: UnavailableError when there is no worker in that time, InternalError for a request whose
    workers die before they yield a token of it.
    """
    await pool.wait_out_change()
    replica = pool.choose()
    traits, token_ids, num_deaths = replica.traits, list[int](), 0
    for _ in range(_MAX_MOVES):
        num_tokens_before = len(token_ids)
        try:
            continued = _continued(request, token_ids)
            with CallSpan(span, replica, continued) as call:
                async with contextlib.aclosing(replica.generate(continued)) as replies:
                    async for reply in replies:
                        if reply.token_ids:
                            token_ids += reply.token_ids
                            num_deaths = 0
                        if reply.finish_reason != UNFINISHED:
                            call.note(reply)
                        yield reply
                        if reply.finish_reason != UNFINISHED:
                            return
        except ReplicaLostError as error:
            if len(token_ids) == num_tokens_before:
                num_deaths += error.reason != "draining" and error.was_reached
            if num_deaths == _MAX_DEATHS:
                logger.error("request %s: %d workers in a row were lost with it", request.request_id, num_deaths)
                raise InternalError(
                    f"{num_deaths} workers in a row were lost with this request before they yielded a token of it; no "
                    "third one is tried"
                ) from error
            logger.warning("request %s is moved: its target is %s", request.request_id, error.reason)
            count_move(error.reason)
            replica = await pool.wait_for(traits if token_ids else None, max_pause_seconds)
            traits = traits if token_ids else replica.traits
    raise UnavailableError(f"the request was moved {_MAX_MOVES} times without an end; retry")


def _continued(request: target_pb2.GenerateRequest, token_ids: Sequence[int]) -> target_pb2.GenerateRequest:
    """`request`, of which `token_ids` have been generated."""
    if not token_ids:
        return request
    continued = target_pb2.GenerateRequest()
    continued.CopyFrom(request)
    continued.prompt_token_ids.extend(token_ids)
    continued.num_generated_tokens += len(token_ids)
    return continued
