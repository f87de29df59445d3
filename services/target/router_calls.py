"""The running calls: passes their requests to the engine, and its commits to the calls' streams."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from cluster.config import Config
from cluster.engine.sequence import FinishReason
from cluster.errors import InternalError, InvalidRequestError, OutriderError, OverloadedError, UnavailableError
from cluster.grammars.compiler import GrammarCompiler
from cluster.targets.base import GenerationOutput, GenerationRequest, Target
from cluster.telemetry.tracing import Tracer
from cluster.wire.replies import UNFINISHED, CallReply, RoundCounts
from protos.speculation.v1 import target_pb2
from services.shared_limit import SharedLimit
from services.target.request_limits import MIN_WAITING_TOKENS, RequestLimits
from services.target.requests import to_engine
from services.target.tracing import CallTrace, trace_call

logger = logging.getLogger(__name__)

_DRAIN_POLL_SECONDS = 0.05
_MAX_ENDED_REPLIES = 1024  # unread replies of a stream to ended calls; further calls wait until they are read

_WIRE_FINISH_REASONS = {
    None: UNFINISHED,
    FinishReason.STOP: target_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: target_pb2.FINISH_REASON_LENGTH,
}


class RouterStream:
    """One stream of a router: its running calls, and their unsent replies.

    At most one reply per call waits; later ones are merged into it.
    """

    def __init__(self) -> None:
        self.running: dict[int, str] = {}  # the ID of each call's request in the engine
        self.error: OutriderError | None = None  # the error that it ends with
        self._waiting: dict[int, CallReply] = {}
        self._is_closed = False
        self._has_replies = asyncio.Event()
        self._was_taken = asyncio.Event()

    def put(self, call: int, reply: CallReply) -> None:
        waiting = self._waiting.get(call)
        if waiting is None:
            self._waiting[call] = reply
        else:
            waiting.merge(reply)
        self._has_replies.set()

    def drop(self, call: int) -> None:
        """Drops the unsent replies of `call`."""
        self._waiting.pop(call, None)

    def close(self, error: OutriderError | None = None) -> None:
        """Ends the stream. `error`: the reason for which its calls were lost, if they were."""
        self._is_closed, self.error = True, error
        self._has_replies.set()
        self._was_taken.set()

    async def take(self) -> dict[int, CallReply]:
        """Waits for replies and returns all of them, by call; none once the stream is closed."""
        while not (self._waiting or self._is_closed):
            self._has_replies.clear()
            await self._has_replies.wait()
        replies, self._waiting = self._waiting, {}
        self._was_taken.set()
        return replies

    async def has_room(self) -> None:
        """Waits while a router that does not read has too many unsent replies to ended calls."""
        while len(self._waiting) - len(self.running) > _MAX_ENDED_REPLIES and not self._is_closed:
            self._was_taken.clear()
            await self._was_taken.wait()


class Calls:
    """All calls of all streams. Except for `publish`, belongs to the event loop in which it was made."""

    def __init__(
        self,
        target: Target,
        max_speculative_tokens: int,
        tracer: Tracer | None = None,
        grammars: GrammarCompiler | None = None,
        max_waiting_tokens: int = 2**22,
        limits: RequestLimits | None = None,
    ) -> None:
        self._target = target
        self.limits = limits or RequestLimits(Config())
        self._waiting_tokens = SharedLimit(max_waiting_tokens)
        # Owners and tokens of requests that have generated nothing yet, by ID in the engine.
        self._waiting: dict[str, tuple[bytes, int]] = {}
        self._tracer = tracer or Tracer()
        self._grammars = grammars
        self._compiling: dict[str, asyncio.Task[None]] = {}  # tasks of requests that wait for their grammar
        self._max_speculative_tokens = max_speculative_tokens
        self._loop = asyncio.get_running_loop()
        self._suffixes = itertools.count()
        self._streams: set[RouterStream] = set()
        self._running: dict[str, tuple[RouterStream, int, CallTrace | None]] = {}  # by the request's ID in the engine
        self.is_draining = False

    @property
    def error(self) -> BaseException | None:
        """The error that ended the engine's loop, if any."""
        return self._target.error

    @property
    def is_stuck(self) -> bool:
        return self._target.is_stuck

    @contextlib.contextmanager
    def stream(self) -> Iterator[RouterStream]:
        """Yields a new stream. Cancels the stream's calls on exit."""
        stream = RouterStream()
        if self.is_draining:
            stream.close()
        self._streams.add(stream)
        try:
            yield stream
        finally:
            self._streams.remove(stream)
            for call in list(stream.running):
                self.cancel(stream, call)

    def start(self, stream: RouterStream, call: int, request: target_pb2.GenerateRequest) -> None:
        """Starts `call`; answers an invalid `request` with an error.

        Raises InvalidRequestError if `call` runs already.
        """
        if call in stream.running:
            raise InvalidRequestError(f"call {call} has been started already")
        request_id = f"{request.request_id}#{next(self._suffixes)}"  # callers' IDs need not be unique
        stream.running[call] = request_id
        trace = trace_call(self._tracer, request, self._target.model.name)
        self._running[request_id] = stream, call, trace
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("call begins", extra={"fields": _fields(request_id, request)})
        with self._failing(request_id, "request could not be started"):
            if self.is_draining:
                raise UnavailableError("the target is shutting down")
            self._let_wait(request_id, request)
            self.limits.started(request_id, request, self._waiting_tokens.held, len(self._running))
            generation = to_engine(
                request, request_id, self._target, self._max_speculative_tokens, is_traced=trace is not None
            )
            if generation.constraints.grammar is None:
                self._target.submit(generation)
            else:
                self._compiling[request_id] = asyncio.create_task(self._compile(generation))

    def _let_wait(self, request_id: str, request: target_pb2.GenerateRequest) -> None:
        """Counts the tokens of `request`. Raises OverloadedError if too many tokens wait already."""
        num_tokens = len(request.prompt_token_ids) + len(request.constraints.allowed_token_ids)
        num_tokens = max(num_tokens, MIN_WAITING_TOKENS)
        waiting, may_exceed = self._waiting_tokens, bool(request.num_generated_tokens)
        if waiting.held and not may_exceed and not waiting.has_room(request.owner, num_tokens):
            raise OverloadedError(f"sequences with {waiting.held} tokens are waiting already, of {waiting.limit}")
        self._waiting[request_id] = request.owner, num_tokens
        waiting.take(request.owner, num_tokens)

    def _end_waiting(self, request_id: str) -> None:
        if request_id in self._waiting:
            self._waiting_tokens.give_back(*self._waiting.pop(request_id))

    def cancel(self, stream: RouterStream, call: int) -> None:
        """Frees the sequence of `call`, without further replies. Does nothing if it has ended."""
        stream.drop(call)
        request_id = stream.running.get(call)
        if request_id is not None:
            self._end(request_id)
            self._target.abort(request_id)

    async def _compile(self, request: GenerationRequest) -> None:
        """Submits `request` once its grammar is compiled."""
        grammar = request.constraints.grammar
        assert grammar is not None
        with self._failing(request.request_id, "grammar could not be compiled"):
            if self._grammars is None:
                raise InvalidRequestError("this target's engine does not support grammars")
            compiled = await self._grammars.compile(grammar)
            self._target.submit(dataclasses.replace(request, grammar=compiled))

    def publish(self, outputs: Sequence[GenerationOutput]) -> None:
        """Called from the engine's thread after each step."""
        self._loop.call_soon_threadsafe(self._distribute, outputs)

    async def drain(self, seconds: float) -> None:
        """Starts no more calls, and ends each stream after its last one, within `seconds`.

        Ends calls that still run then, so that their routers move them elsewhere. If the engine is dead, streams end at
        once with an error.
        """
        self.is_draining = True
        for stream in self._streams:
            if not stream.running:
                stream.close()
        deadline = self._loop.time() + seconds
        # An engine that dies sends no notification, so there is nothing to wait for.
        while self._running and self._target.error is None and self._loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        if self._target.error is not None:
            for stream in self._streams:
                stream.close(InternalError("the target's engine has stopped"))
        else:
            for request_id in list(self._running):
                self._fail(request_id, UnavailableError("the target is shutting down"))
                self._target.abort(request_id)

    def _distribute(self, outputs: Sequence[GenerationOutput]) -> None:
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is None:  # cancelled meanwhile
                continue
            stream, call, trace = running
            if output.error is not None:
                if output.token_ids:  # they precede it
                    stream.put(call, _to_reply(output))
                self._fail(output.request_id, output.error)
                continue
            if trace is not None:
                trace.count(output)
                if output.admitted_at is not None:  # routers do not need it
                    continue
            if output.token_ids:
                self._end_waiting(output.request_id)
                self.limits.committed(output.request_id, len(output.token_ids))
            stream.put(call, _to_reply(output))
            if output.finish_reason is not None:
                self._end(output.request_id, output.finish_reason)

    @contextlib.contextmanager
    def _failing(self, request_id: str, what: str) -> Iterator[None]:
        """Ends the request with an error that is raised inside.

        An unexpected error must not end the other calls of the stream; its message says `what` failed.
        """
        try:
            yield
        except OutriderError as error:
            self._fail(request_id, error)
        except Exception:
            logger.exception("a %s", what)
            self._fail(request_id, InternalError(f"the {what}"))

    def _fail(self, request_id: str, error: OutriderError) -> None:
        stream, call, _ = self._running[request_id]
        stream.put(call, CallReply(error=error))
        self._end(request_id, error=error)

    def _end(
        self, request_id: str, finish_reason: FinishReason | None = None, error: OutriderError | None = None
    ) -> None:
        compiling = self._compiling.pop(request_id, None)
        if compiling is not None and compiling is not asyncio.current_task():
            compiling.cancel()
        self._end_waiting(request_id)
        self.limits.ended(request_id)
        stream, call, trace = self._running.pop(request_id)
        del stream.running[call]
        error = error or stream.error
        if trace is not None:
            trace.end(finish_reason, error)
        if logger.isEnabledFor(logging.DEBUG):
            outcome = "abort" if finish_reason is None else finish_reason.value
            outcome = outcome if error is None else error.error_type
            logger.debug("call ends", extra={"fields": {"request_id": request_id, "outcome": outcome}})
        if self.is_draining and not stream.running:
            stream.close()


def _fields(request_id: str, request: target_pb2.GenerateRequest) -> dict[str, Any]:
    """Returns the log line of a call that begins."""
    return {
        "request_id": request_id,
        "choice": request.choice_index,
        "prompt_tokens": len(request.prompt_token_ids) - request.num_generated_tokens,
        "earlier_tokens": request.num_generated_tokens,
        "max_tokens": request.max_tokens,
        "adapter": request.adapter,
    }


def _to_reply(output: GenerationOutput) -> CallReply:
    reply = CallReply(
        list(output.token_ids),
        _WIRE_FINISH_REASONS[output.finish_reason],
        logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs,
        num_cached_tokens=output.num_cached_tokens,
    )
    if output.num_draft_tokens:
        reply.rounds = (RoundCounts(output.num_draft_tokens, output.num_accepted_tokens),)
    return reply
