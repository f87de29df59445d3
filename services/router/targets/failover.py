"""Runs a sequence to its end on any target, even if its worker is lost.

A worker that takes over gets the prompt with all tokens so far, the seed and the choice's index. The random noise only
depends on the seed, the index and the position, and penalties only on the tokens. So the answer continues as it would
have, and the client only notices a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from cluster.errors import InternalError, OverloadedError, UnavailableError
from cluster.telemetry.tracing import Span
from cluster.wire.replies import UNFINISHED, CallReply
from services.router.errors import ModelNotFoundError
from services.router.targets.call_span import CallSpan
from services.router.targets.choice_request import ChoiceRequest
from services.router.targets.replicas import AdapterRef, Replica, ReplicaLostError, ReplicaPool

logger = logging.getLogger(__name__)

_MAX_LOST_TARGETS = 2  # workers that a request may lose in a row without a new token: it may be the cause
_MAX_MOVES = 32
_FULL_PAUSE_S = 0.5


class CallObserver(Protocol):
    """Observes the calls of one sequence."""

    span: Span
    """The HTTP request's; each call on a worker has a span below it."""

    def sent(self, num_predicted_tokens: int) -> None:
        """Records that the sequence is sent to a worker.

        `num_predicted_tokens`: prompt tokens that the router expects in that worker's prefix cache.
        """

    def moved(self, reason: str) -> None:
        """Records that another worker continues. `reason`: what happened to the previous one."""


async def run_anywhere(
    pool: ReplicaPool,
    request: ChoiceRequest,
    max_pause_seconds: float,
    observer: CallObserver,
    is_patient: Callable[[], bool],
) -> AsyncGenerator[CallReply, None]:
    """Yields the replies to `request`, up to one with a finish reason.

    If a worker is lost, waits up to `max_pause_seconds` for another one. Once there are tokens, it must have the same
    traits, unless the pool allows different ones. If all targets are full, waits for the same time if there are tokens
    or `is_patient` returns True. Closing the generator frees the sequence.

    Raises UnavailableError if no worker can continue in that time, or after _MAX_MOVES moves. Raises OverloadedError
    if all targets are full. Raises InternalError if _MAX_LOST_TARGETS in a row were lost without a new token, or if the
    only target failed. Raises ModelNotFoundError if the adapter has been unloaded. Errors that a target reports for the
    request are raised, too.
    """
    await pool.wait_out_change()
    request_id, adapter = request.template.request_id, AdapterRef.of(request.template)
    replica = pool.choose(None, adapter, request.routing_key)
    traits, token_ids, num_lost_targets, num_scored = replica.traits, list[int](), 0, 0
    full, lost, num_moves, last_answer_at = set[Replica](), set[Replica](), 0, time.monotonic()
    while num_moves < _MAX_MOVES:
        num_tokens_before, num_rescored = len(token_ids), 0
        try:
            continued = request.to_wire(token_ids)
            observer.sent(request.routing_key.num_predicted(replica))
            with CallSpan(observer.span, replica, continued) as call:
                replies = replica.generate(continued, request.routing_key)
                del continued  # frees the message, which may be large, while the call runs
                async with contextlib.aclosing(replies):
                    async for reply in replies:
                        if reply.prompt_logprobs is not None:  # another worker sends them from the beginning again
                            scores, start = reply.prompt_logprobs, max(0, num_scored - num_rescored)
                            num_rescored += len(scores)
                            reply.prompt_logprobs = scores.part(start, len(scores))
                            num_scored = max(num_scored, num_rescored)
                        if reply.token_ids:
                            token_ids += reply.token_ids
                            num_lost_targets, last_answer_at = 0, time.monotonic()
                            full.clear()
                            lost.clear()
                        if reply.finish_reason != UNFINISHED:
                            call.note(reply)
                        yield reply
                        if reply.finish_reason != UNFINISHED:
                            return
        except OverloadedError as error:
            full.add(replica)
            like = traits if token_ids else None
            another = pool.find(like, adapter, request.routing_key, full)
            if another is not None:
                replica = another
                continue
            if not (token_ids or is_patient()) or time.monotonic() > last_answer_at + max_pause_seconds:
                raise OverloadedError("all targets are full; retry later") from error
            full.clear()
            await asyncio.sleep(_FULL_PAUSE_S)
            replica = await pool.wait_for(like, max_pause_seconds, adapter, request.routing_key)
        except ReplicaLostError as error:
            num_moves += 1
            if len(token_ids) == num_tokens_before:
                num_lost_targets += error.reason in ("lost", "stuck", "failed") and error.was_reached
            if num_lost_targets == _MAX_LOST_TARGETS:
                logger.error("request %s: %d workers in a row were lost with it", request_id, num_lost_targets)
                raise InternalError(
                    f"{num_lost_targets} workers in a row were lost with this request before they yielded a token of "
                    "it; it is not retried"
                ) from error
            logger.debug("request %s moves to another target: its own is %s", request_id, error.reason)
            observer.moved(error.reason)
            if error.reason == "unloaded" and adapter is not None:
                replica.forget(adapter)
                if not pool.knows(adapter.name):
                    raise ModelNotFoundError(
                        f"the adapter {adapter.name!r} has been unloaded", param="model"
                    ) from error
            like = traits if token_ids else None
            lost.add(replica)
            another = pool.find(like, adapter, request.routing_key, lost)
            if another is None and error.reason == "failed":  # the same target would probably fail again
                raise InternalError(error.message) from error
            replica = another or await pool.wait_for(like, max_pause_seconds, adapter, request.routing_key)
            traits = traits if token_ids else replica.traits
    raise UnavailableError(f"the request was moved {_MAX_MOVES} times without finishing; retry")
