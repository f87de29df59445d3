"""A coordinator's end of the stream to one draft worker: connects, checks the pair, reconnects."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from cluster.errors import ConfigurationError
from cluster.telemetry.metrics import Reading
from cluster.wire.codec import decode_reply, encode_request
from cluster.wire.messages import SpeculateReply, SpeculateRequest
from cluster.wire.outbox import Outbox
from protos.speculation.v1 import draft_pb2, draft_pb2_grpc, types_pb2

logger = logging.getLogger(__name__)

_RECONNECT_SECONDS = (0.1, 0.2, 0.5, 1.0)
_NUM_ANSWER_TIMES = 64
_LABEL_DIGITS = 8
_DESCRIBE_TIMEOUT_SECONDS = 5.0
_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 16 * 2**20),
    # A worker that has gone silent is noticed in four seconds. Without the last option a ping may stay unanswered for a
    # minute, and without the one before a link that has nothing to say would stop asking.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.ping_timeout_ms", 2000),
)


class LinkState(enum.Enum):
    DOWN = enum.auto()
    UP = enum.auto()


@dataclass(frozen=True, slots=True)
class LinkEvent:
    """Something that happened on a link: it went up or down, or a reply came."""

    link: DraftLink
    event: LinkState | SpeculateReply
    answer_seconds: float = 0.0  # of a reply: since the last message that was sent


@dataclass(slots=True)
class LinkTraffic:
    """Protobuf payload over a link's whole life, and the processor's time to make and read it."""

    opens: int = 0  # bytes sent, for opening sequences
    sent: int = 0  # bytes of all else that was sent
    received: int = 0  # bytes
    codec_seconds: float = 0.0  # of the links' thread; with handing replies over to the engine's


class DraftLink:
    """One draft worker. `run` belongs to an event loop; `send` may be called from any thread and never blocks."""

    def __init__(
        self,
        address: str,
        tokenizer_fingerprint: str,
        notify: Callable[[LinkEvent], None],
        expected_round_trip: float | None = None,
    ) -> None:
        self.address = address
        self.expected_round_trip = expected_round_trip  # seconds, by its place; None: nobody knows
        self.model = ""  # which draft model its worker runs, as of when the link came up
        self.traffic = LinkTraffic()
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._notify = notify
        self._outbox: Outbox[SpeculateRequest] | None = None  # while the stream is up
        self._sent_at = 0.0
        self._answer_times: deque[float] = deque(maxlen=_NUM_ANSWER_TIMES)

    @property
    def is_up(self) -> bool:
        return self._outbox is not None

    @property
    def round_trip_seconds(self) -> float | None:
        """The shortest of the last answers: the others have drafting in them. None before the first."""
        return min(self._answer_times, default=None)

    def send(self, request: SpeculateRequest) -> None:
        """Hands `request` to the stream. Dropped while the link is down: its sequences are gone there."""
        outbox = self._outbox
        if outbox is not None:
            outbox.put(request)

    def readings(self) -> Iterator[Reading]:
        """Any thread."""
        if self.round_trip_seconds is not None:
            yield Reading(
                "outrider_link_round_trip_seconds",
                "Shortest of a link's last answers.",
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
            "Processor time to make and read the links' messages.",
            self.traffic.codec_seconds,
            is_counter=True,
            labels={"draft": self.address},
        )

    async def run(self) -> None:
        """Keeps the link up until cancelled."""
        attempt = 0
        async with grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS) as channel:
            stub = draft_pb2_grpc.DraftStub(channel)
            while True:
                try:
                    await self._check_pair(stub)
                    attempt = 0
                    await self._stream(stub)
                except grpc.aio.AioRpcError as error:
                    logger.debug("draft worker %s: %s", self.address, error.details())
                except ValueError as error:
                    logger.error("draft worker %s sent an unusable message: %s", self.address, error)
                    attempt = len(_RECONNECT_SECONDS)  # it will hardly send others so soon
                except ConfigurationError as error:
                    logger.error("%s", error)
                    attempt = len(_RECONNECT_SECONDS)
                except Exception:
                    # A link that ended for good would take its drafter from the pool without a word.
                    logger.exception("the link to draft worker %s failed", self.address)
                await asyncio.sleep(_RECONNECT_SECONDS[min(attempt, len(_RECONNECT_SECONDS) - 1)])
                attempt += 1

    async def _check_pair(self, stub: draft_pb2_grpc.DraftStub) -> None:
        """Notes the worker's model. Raises ConfigurationError when its tokenizer is another than the target's."""
        description = await stub.Describe(types_pb2.DescribeRequest(), timeout=_DESCRIBE_TIMEOUT_SECONDS)
        fingerprint = description.model.tokenizer_fingerprint
        if fingerprint != self._tokenizer_fingerprint:
            raise ConfigurationError(
                f"draft worker {self.address} ({description.model.name}) is not used: its tokenizer "
                f"{fingerprint} differs from the target's {self._tokenizer_fingerprint}"
            )
        self.model = _label(description.model)

    async def _stream(self, stub: draft_pb2_grpc.DraftStub) -> None:
        """One life of the stream: up, replies, down."""
        call = stub.Speculate()
        await call.wait_for_connection()
        outbox: Outbox[SpeculateRequest] = Outbox()
        self._outbox = outbox
        logger.info("link to draft worker %s is up", self.address)
        self._notify(LinkEvent(self, LinkState.UP))
        writer = asyncio.create_task(self._write(call, outbox))
        try:
            async for message in call:
                answer_seconds = time.perf_counter() - self._sent_at
                self._answer_times.append(answer_seconds)
                started_at = time.thread_time()
                self.traffic.received += message.ByteSize()
                self._notify(LinkEvent(self, decode_reply(message), answer_seconds))
                self.traffic.codec_seconds += time.thread_time() - started_at
        finally:
            self._outbox = None
            call.cancel()
            writer.cancel()
            outbox.close()
            await asyncio.gather(writer, return_exceptions=True)
            logger.info("link to draft worker %s is down", self.address)
            self._notify(LinkEvent(self, LinkState.DOWN))

    async def _write(
        self,
        call: grpc.aio.StreamStreamCall[draft_pb2.SpeculateRequest, draft_pb2.SpeculateReply],
        outbox: Outbox[SpeculateRequest],
    ) -> None:
        while True:
            request = await outbox.take()
            started_at = time.thread_time()
            message = encode_request(request)
            num_bytes = message.ByteSize()
            num_open_bytes = sum(entry.ByteSize() for entry in message.open)
            self.traffic.opens += num_open_bytes
            self.traffic.sent += num_bytes - num_open_bytes
            self.traffic.codec_seconds += time.thread_time() - started_at
            self._sent_at = time.perf_counter()
            await call.write(message)


def _label(model: types_pb2.ModelDescription) -> str:
    """Two models never share one, if their workers say what they are; a worker of before says only its model's name."""
    return f"{model.name}@{model.fingerprint[:_LABEL_DIGITS]}" if model.fingerprint else model.name
