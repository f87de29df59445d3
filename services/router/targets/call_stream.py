"""The calls of this router on one target, which share one gRPC stream."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from cluster.errors import OutriderError
from cluster.wire.parsing import parse
from cluster.wire.replies import EPOCH_KEY, UNFINISHED, CallReply, decode_replies
from protos.speculation.v1 import target_pb2
from services.router.targets.reply_limits import ReplyLimits

if TYPE_CHECKING:
    _Stream = grpc.aio.StreamStreamCall[target_pb2.GenerateCommands, bytes]

logger = logging.getLogger(__name__)

_COMMAND_BYTES = 2**18  # size from which no more commands are added to a message; workers accept up to 16 MiB
_SPARE_BYTES = 2**20  # of a message: errors, and replies to calls that have ended
_WOKEN_AT_ONCE = 16  # number of calls to wake before the event loop does other work


class Call:
    """One sequence's call. At most one reply waits to be taken: later ones are merged into it."""

    def __init__(self, cancel: Callable[[], None], limits: ReplyLimits | None = None) -> None:
        self.limits = limits
        self.has_ended = False  # the last reply was taken, or the error raised
        self._loop = asyncio.get_running_loop()
        self._cancel = cancel
        self._waiting: CallReply | None = None
        self._arrival: asyncio.Future[None] | None = None

    def put(self, reply: CallReply) -> bool:
        """Keeps `reply` for `take`. Returns True if no other reply was waiting.

        The caller must then call `wake`, now or soon.
        """
        if self._waiting is not None:
            self._waiting.merge(reply)
            return False
        self._waiting = reply
        return True

    def wake(self) -> None:
        """Resumes `take` if a reply is waiting."""
        if self._waiting is not None and self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def take(self) -> CallReply:
        """Waits for a reply, and returns all since the last `take` as one.

        Raises the OutriderError that ended the call.
        """
        if self._waiting is None:
            self._arrival = self._loop.create_future()
            await self._arrival
        assert self._waiting is not None
        reply, self._waiting = self._waiting, None
        if reply.error is not None:
            if not reply.token_ids:
                self.has_ended = True
                raise reply.error
            self._waiting = CallReply(error=reply.error)  # kept for the next `take`: the tokens come first
        self.has_ended = reply.finish_reason != UNFINISHED
        return reply

    def cancel(self) -> None:
        """Frees the sequence unless it has ended."""
        if not self.has_ended:
            self._cancel()


class _OtherWorkerError(Exception):
    """Another worker than the described one serves the stream."""


class CallStream:
    """One gRPC stream to a target. When it ends, all calls on it end.

    The next call then needs a new stream. The reader never waits for a call, so a slow client does not delay others.
    Calls are woken a few at a time. If a message arrives before all of them are woken, its replies are merged into
    those that wait: an overloaded router writes fewer and longer chunks instead of falling behind.
    """

    def __init__(
        self,
        stream: _Stream,
        translate: Callable[[OutriderError], OutriderError],
        explain: Callable[[str | None], OutriderError],
        epoch: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """`stream` yields its messages as bytes.

        `translate` returns the caller's error for an error that the target reports.

        `explain` returns the caller's error for the end of the stream. It gets the reason why the stream broke, or None
        if the worker closed it normally. If a worker with another `epoch` serves the stream, all calls on it fail,
        because the target's description is about a different worker. `vocab_size`: number of tokens of the model.
        """
        self.has_begun = False  # whether a worker serves it
        self.has_ended = False
        self.is_unusable = False  # whether it ended because the worker sent an unusable message
        self._epoch = epoch
        self._vocab_size = vocab_size
        self._open_bytes = 0  # maximum size of the replies to all calls
        self._max_message_bytes = _SPARE_BYTES  # based on the most calls that ran at once
        self._stream = stream
        self._translate = translate
        self._explain = explain
        self._numbers = itertools.count()
        self._calls: dict[int, Call] = {}
        self._woken_next: deque[Call] = deque()
        self._unsent: OrderedDict[int, target_pb2.StartCall] = OrderedDict()
        self._cancelled: list[int] = []  # cancelled calls that the worker is not notified of yet
        self._has_commands = asyncio.Event()
        self._reader = asyncio.create_task(self._read())
        self._writer = asyncio.create_task(self._write())

    def start(self, request: target_pb2.GenerateRequest) -> Call:
        number = next(self._numbers)
        limits = ReplyLimits(request, self._vocab_size)
        call = self._calls[number] = Call(lambda: self._cancel(number), limits)
        self._open_bytes += limits.max_bytes
        self._max_message_bytes = max(self._max_message_bytes, _SPARE_BYTES + self._open_bytes)
        self._unsent[number] = target_pb2.StartCall(call=number, request=request)
        self._has_commands.set()
        return call

    def fail(self, error: OutriderError) -> None:
        """Ends every call with `error`, and the stream. The worker then frees their sequences."""
        if self.has_ended:
            return
        self.has_ended = True
        self._stream.cancel()
        self._reader.cancel()
        self._writer.cancel()
        # Each call gets a copy: an exception that many tasks raise would collect all their tracebacks.
        self._deliver({number: CallReply(error=copy.copy(error)) for number in self._calls})

    async def close(self) -> None:
        """Closes the stream. Must be called only when no caller waits for a reply any more."""
        self._stream.cancel()
        self._reader.cancel()
        self._writer.cancel()
        await asyncio.gather(self._reader, self._writer, return_exceptions=True)

    def _cancel(self, number: int) -> None:
        if number not in self._calls:  # the last reply has arrived, and was not taken
            return
        self._forget(number)
        if self._unsent.pop(number, None) is None:  # an unsent call needs no cancellation
            self._cancelled.append(number)
            self._has_commands.set()

    async def _write(self) -> None:
        # When the stream breaks, `_read` finds the reason and ends the calls.
        with contextlib.suppress(grpc.aio.BaseError, asyncio.InvalidStateError):
            while True:
                await self._stream.write(await self._next_commands())

    async def _next_commands(self) -> target_pb2.GenerateCommands:
        """Waits for commands, and returns them as one message; only some if they are large."""
        while not (self._unsent or self._cancelled):
            self._has_commands.clear()
            await self._has_commands.wait()
        commands = target_pb2.GenerateCommands(cancel=self._cancelled)
        self._cancelled = []
        num_bytes = commands.ByteSize()
        while num_bytes < _COMMAND_BYTES and self._unsent:
            _, start = self._unsent.popitem(last=False)
            num_bytes += start.ByteSize()
            commands.start.append(start)
        return commands

    async def _read(self) -> None:
        reason: str | None = None
        try:
            await self._check_worker()
            async for message in self._stream:
                self.has_begun = True
                if len(message) > self._max_message_bytes:
                    raise ValueError(f"{len(message)} bytes, of {self._max_message_bytes} at most")
                self._receive(decode_replies(parse(target_pb2.GenerateReplies, message)))
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except _OtherWorkerError as error:
            reason = str(error)
        except ValueError as error:
            self.is_unusable, reason = True, str(error)
        except Exception:  # after any exception the waiting calls have to end
            logger.exception("a message of a target is unusable")
            self.is_unusable, reason = True, "see the router's log"
        self.fail(self._explain(reason))

    async def _check_worker(self) -> None:
        """Raises _OtherWorkerError if another worker serves the stream. Older versions report no epoch."""
        metadata = await self._stream.initial_metadata()
        if metadata is None or self._stream.done():
            return
        self.has_begun = True
        epoch = next((value for key, value in metadata if key == EPOCH_KEY), None)
        if self._epoch is not None and epoch not in (None, str(self._epoch)):
            raise _OtherWorkerError(f"another worker (epoch {epoch!r}) serves the stream")

    def _receive(self, replies: dict[int, CallReply]) -> None:
        for number, reply in replies.items():
            call = self._calls.get(number)
            if call is not None and call.limits is not None:
                call.limits.check(reply)
            if reply.error is not None:
                reply.error = self._translate(reply.error)
        self._deliver(replies)

    def _deliver(self, replies: dict[int, CallReply]) -> None:
        is_waking = bool(self._woken_next)
        for number, reply in replies.items():
            call = self._calls.get(number)
            if call is None:  # cancelled meanwhile
                continue
            if reply.error is not None or reply.finish_reason != UNFINISHED:
                self._forget(number)
            if call.put(reply):
                self._woken_next.append(call)
        if not is_waking:
            self._wake_some()

    def _forget(self, number: int) -> None:
        limits = self._calls.pop(number).limits
        self._open_bytes -= 0 if limits is None else limits.max_bytes

    def _wake_some(self) -> None:
        for _ in range(min(_WOKEN_AT_ONCE, len(self._woken_next))):
            self._woken_next.popleft().wake()
        if self._woken_next:
            asyncio.get_running_loop().call_soon(self._wake_some)
