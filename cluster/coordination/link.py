"""A coordinator's end of the stream to one draft worker: connects, checks the worker's model, reconnects."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from cluster.coordination.backoff import Backoff
from cluster.coordination.base import LinkEvent, LinkState
from cluster.coordination.open_sequences import OpenSequences
from cluster.errors import ConfigurationError
from cluster.telemetry.metrics import Reading
from cluster.transport.dialing import KEEPALIVE, PLAIN, Dialer
from cluster.wire.codec import decode_reply, encode_request
from cluster.wire.messages import SpeculateRequest
from cluster.wire.outbox import Outbox
from cluster.wire.parsing import parse
from protos.speculation.v1 import draft_pb2, types_pb2

if TYPE_CHECKING:
    _Call = grpc.aio.StreamStreamCall[draft_pb2.SpeculateRequest, bytes]

logger = logging.getLogger(__name__)

_RECONNECT_SECONDS = 0.5  # maximum pause before calling an unreachable worker again: it may return at any time
_REPAIR_SECONDS = 30.0  # maximum pause if the worker is unusable, or its stream ends right after it is up
_STABLE_SECONDS = 5.0  # a stream that lived this long did not end because of its first message
_MAX_OPEN_TOKENS = 2**18  # in a message, at up to 5 bytes each; one longer sequence may exceed it: workers take 16 MiB
_NUM_ROUND_TRIPS = 64
_MAX_WAITING_BYTES = 2**20  # unread replies of a link; the last one may exceed it
_REPLY_BYTES = 1024  # minimum cost of a reply
_WAIT_SECONDS = 0.002
_LABEL_DIGITS = 8
_SERVICE = "speculation.v1.Draft"
_MAX_NAME_CHARACTERS = 256
_MAX_REASON_CHARACTERS = 200
_STOPPED = "Cancelling all calls"  # gRPC's message when a server is being shut down
_DESCRIBE_TIMEOUT_SECONDS = 5.0
_LINK_OPTIONS = (
    ("grpc.max_receive_message_length", 16 * 2**20),
    # A fixed window: the estimated one grows to many MiB for a worker that floods the link.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2**18),
    ("grpc.http2.max_pings_without_data", 0),  # otherwise an idle link would stop sending pings
    *KEEPALIVE,
)


@dataclass(slots=True)
class LinkTraffic:
    """Protobuf payload over a link's whole life, and the CPU time to encode and decode it."""

    opens: int = 0  # bytes sent to open sequences
    sent: int = 0  # bytes sent otherwise
    received: int = 0  # bytes received
    codec_seconds: float = 0.0  # processor time in the links' thread, including the time to queue replies


class DraftLink:
    """Link to one draft worker. `run` belongs to an event loop; `send` is thread-safe and never blocks."""

    def __init__(
        self,
        address: str,
        tokenizer_fingerprint: str,
        notify: Callable[[LinkEvent], None],
        expected_round_trip: float | None = None,
        dialer: Dialer = PLAIN,
    ) -> None:
        self.address = address
        self.expected_round_trip = expected_round_trip  # seconds, estimated from the worker's place; None: unknown
        self.model = ""  # the worker's draft model, as of when the link came up
        self.is_one_pass = False  # whether one step drafts a whole proposal, as of when the link came up
        self.traffic = LinkTraffic()
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._notify = notify
        self._dialer = dialer
        self._refusal: str | None = None  # the last logged reason why the link may not come up
        self._is_unusable = False  # True: the worker needs repair, so the link pauses up to `_REPAIR_SECONDS`
        self._outbox: Outbox[SpeculateRequest] | None = None  # set while the stream is up
        self._sent_at = 0.0
        # Replies of all streams, in bytes. Each counter is written by one thread only.
        self.num_taken_bytes = 0
        self._num_delivered_bytes = 0
        self._round_trips: deque[float] = deque(maxlen=_NUM_ROUND_TRIPS)

    @property
    def is_up(self) -> bool:
        return self._outbox is not None

    @property
    def round_trip_seconds(self) -> float | None:
        """Shortest round trip of the last messages, in seconds. None before the first."""
        return min(self._round_trips, default=None)

    def send(self, request: SpeculateRequest) -> None:
        """Sends `request` on the stream. Drops it while the link is down, because the worker lost its sequences."""
        outbox = self._outbox
        if outbox is not None:
            outbox.put(request)

    def readings(self) -> Iterator[Reading]:
        """Any thread."""
        if self.round_trip_seconds is not None:
            yield Reading(
                "outrider_link_round_trip_seconds",
                "Shortest round trip among a link's recent messages.",
                self.round_trip_seconds,
                labels={"draft": self.address},
            )
        size = "Protobuf payload of the links, by direction; kind `open` is the opening of sequences."
        for kind, direction, value in (
            ("open", "sent", self.traffic.opens),
            ("round", "sent", self.traffic.sent),
            ("round", "received", self.traffic.received),
        ):
            labels = {"draft": self.address, "kind": kind, "direction": direction}
            yield Reading("outrider_link_bytes", size, value, is_counter=True, labels=labels)
        yield Reading(
            "outrider_link_codec_seconds",
            "Processor time spent on writing and reading the links' messages.",
            self.traffic.codec_seconds,
            is_counter=True,
            labels={"draft": self.address},
        )

    async def run(self) -> None:
        """Keeps the link up until cancelled."""
        backoff = Backoff()
        while True:
            version = self._dialer.version
            async with self._dialer.channel(self.address, _LINK_OPTIONS) as channel:
                while version == self._dialer.version:
                    up_seconds = await self._live(channel)
                    if up_seconds >= _STABLE_SECONDS:
                        backoff.succeeded()
                    is_gone = up_seconds == 0.0 and not self._is_unusable
                    await asyncio.sleep(backoff.failed(_RECONNECT_SECONDS if is_gone else _REPAIR_SECONDS))

    async def _live(self, channel: grpc.aio.Channel) -> float:
        """Connects once, and serves the link until it goes down. Returns the seconds that the link was up."""
        up_at: float | None = None
        level, cause = logging.INFO, "the worker has stopped"
        self._is_unusable = False
        try:
            await self._check_pair(channel)
            self._refusal = None
            up_at = time.monotonic()
            await self._stream(channel)
        except grpc.aio.AioRpcError as error:
            if error.details() != _STOPPED:
                details = (error.details() or "")[:_MAX_REASON_CHARACTERS]
                level, cause = logging.WARNING, f"{error.code().name}: {details}"
            if up_at is None:
                self._report(error)
        except ValueError as error:
            self._is_unusable = True  # the worker will probably send unusable messages again
            level, cause = logging.ERROR, f"it sent an unusable message: {error}"
        except ConfigurationError as error:
            self._is_unusable = True
            logger.error("%s", error)
        except Exception as error:
            # The link's task must not end: the pool would lose the worker without a log line.
            logger.exception("the link to draft worker %s failed", self.address)
            level, cause = logging.WARNING, f"{type(error).__name__}: {error}"
        if up_at is None:
            return 0.0
        up_seconds = time.monotonic() - up_at
        logger.log(level, "link to draft worker %s is down after %.1f s: %s", self.address, up_seconds, cause)
        return up_seconds

    def _report(self, error: grpc.aio.AioRpcError) -> None:
        """Logs `error`: at level ERROR if it is a new refusal, which an operator must fix, otherwise at DEBUG."""
        refusal = self._dialer.explain(error)
        if refusal is None or refusal == self._refusal:
            logger.debug("draft worker %s: %s", self.address, error.details())
        else:
            logger.error("draft worker %s: %s", self.address, refusal)
        self._refusal = refusal or self._refusal

    async def _check_pair(self, channel: grpc.aio.Channel) -> None:
        """Stores the worker's model. Raises ConfigurationError if its tokenizer's fingerprint is not the target's."""
        # The answers stay bytes, because gRPC logs a traceback for each message that it cannot parse.
        describe: grpc.aio.UnaryUnaryMultiCallable[types_pb2.DescribeRequest, bytes] = channel.unary_unary(
            f"/{_SERVICE}/Describe", types_pb2.DescribeRequest.SerializeToString
        )
        answer = await describe(types_pb2.DescribeRequest(), timeout=_DESCRIBE_TIMEOUT_SECONDS)
        try:
            description = parse(draft_pb2.DraftDescription, answer)
        except ValueError as error:
            raise ConfigurationError(f"draft worker {self.address} is not used: {error}") from error
        fingerprint = description.model.tokenizer_fingerprint[:_MAX_REASON_CHARACTERS]
        if fingerprint != self._tokenizer_fingerprint:
            raise ConfigurationError(
                f"draft worker {self.address} ({label_of(description.model)}) is not used: its tokenizer "
                f"{fingerprint} differs from the target's {self._tokenizer_fingerprint}; if its draft has most of the "
                "target's tokens, set target.model in the worker's configuration"
            )
        self.model, self.is_one_pass = label_of(description.model), description.is_one_pass

    async def _stream(self, channel: grpc.aio.Channel) -> None:
        """Runs one stream: reports the link as up, delivers replies, reports it as down."""
        speculate: grpc.aio.StreamStreamMultiCallable[draft_pb2.SpeculateRequest, bytes] = channel.stream_stream(
            f"/{_SERVICE}/Speculate", draft_pb2.SpeculateRequest.SerializeToString
        )
        call = speculate()
        await call.wait_for_connection()
        outbox: Outbox[SpeculateRequest] = Outbox()
        self._outbox = outbox
        logger.info("link to draft worker %s is up", self.address)
        self._notify(LinkEvent(self, LinkState.UP))
        opened = OpenSequences()
        reader = asyncio.create_task(self._read(call, opened))
        writer = asyncio.create_task(self._write(call, outbox, opened))
        reader.add_done_callback(lambda _: writer.cancel())
        try:  # a writer whose stream has ended returns, and the reader raises the reason
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self._outbox = None
            call.cancel()
            reader.cancel()
            writer.cancel()
            outbox.close()
            await asyncio.gather(reader, writer, return_exceptions=True)
            self._notify(LinkEvent(self, LinkState.DOWN))
        if not writer.cancelled() and (error := writer.exception()) is not None:
            raise RuntimeError("a request could not be written") from error
        reader.result()

    async def _read(self, call: _Call, opened: OpenSequences) -> None:
        """Delivers the replies until the worker ends the stream. Raises ValueError if one is unusable."""
        async for message in call:
            answer_seconds = time.perf_counter() - self._sent_at
            # gRPC's flow control holds a flood back in the worker, also while the engine is idle and takes nothing.
            while self._num_delivered_bytes - self.num_taken_bytes > _MAX_WAITING_BYTES:  # noqa: ASYNC110
                await asyncio.sleep(_WAIT_SECONDS)
            started_at = time.thread_time()
            num_bytes = len(message)
            if num_bytes > opened.max_reply_bytes:
                raise ValueError(f"{num_bytes} bytes, where {opened.max_reply_bytes} were asked for at most")
            self.traffic.received += num_bytes
            reply = decode_reply(parse(draft_pb2.SpeculateReply, message))
            opened.received(reply)
            held_seconds = 0.0 if reply.timing is None else reply.timing.held_seconds
            if answer_seconds >= held_seconds:  # otherwise the reply crossed the last message
                self._round_trips.append(answer_seconds - held_seconds)
            self._num_delivered_bytes += num_bytes + _REPLY_BYTES
            self._notify(LinkEvent(self, reply, answer_seconds, num_bytes + _REPLY_BYTES))
            self.traffic.codec_seconds += time.thread_time() - started_at

    async def _write(self, call: _Call, outbox: Outbox[SpeculateRequest], opened: OpenSequences) -> None:
        waiting = SpeculateRequest()
        # All of these say that the stream has ended.
        with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            while True:
                newer = outbox.take_waiting() if waiting else await outbox.take()
                if newer is not None:
                    waiting.merge(newer)
                started_at = time.thread_time()
                request = waiting.take_part(_MAX_OPEN_TOKENS)
                opened.sent(request)
                message = encode_request(request)
                num_bytes = message.ByteSize()
                num_open_bytes = sum(entry.ByteSize() for entry in message.open)
                self.traffic.opens += num_open_bytes
                self.traffic.sent += num_bytes - num_open_bytes
                self.traffic.codec_seconds += time.thread_time() - started_at
                self._sent_at = time.perf_counter()
                await call.write(message)


def label_of(model: types_pb2.ModelDescription) -> str:
    """Returns the model's label; unique if the worker reports a fingerprint, otherwise the model's name."""
    name = model.name[:_MAX_NAME_CHARACTERS]
    return f"{name}@{model.fingerprint[:_LABEL_DIGITS]}" if model.fingerprint else name
