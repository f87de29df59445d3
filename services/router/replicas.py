"""The replicas of the target: which of them can answer, which is least loaded, and calling one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from types import TracebackType

import grpc

from cluster.errors import (
    InternalError,
    InvalidRequestError,
    OutriderError,
    OverloadedError,
    UnavailableError,
)
from cluster.wire.replies import CallReply
from protos.speculation.v1 import target_pb2, target_pb2_grpc, types_pb2
from services.router.calls import CallStream

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
POLL_TIMEOUT_S = 3.0
_MAX_MESSAGE_BYTES = 16 * 2**20
_NO_TARGET = "no target worker can answer now; see /health"

_CHANNEL_OPTIONS = [
    # Descriptions cross every half second, so a ping is sent only when the other side has gone silent: a
    # frozen worker is noticed in four seconds.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    # By default a worker that was away for minutes would be tried again only minutes after its return.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # A message has what all of a stream's sequences were given since the last one: it is not cut by its size.
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]


@dataclass(frozen=True)
class Limits:
    """What every usable replica can serve, so that it doesn't matter which one a sequence goes to."""

    vocab_size: int
    max_model_len: int
    max_speculative_tokens: int


class Replica:
    """One target worker as the router sees it. Make it inside a running event loop."""

    def __init__(self, address: str, tokenizer_fingerprint: str) -> None:
        self.address = address
        self.description: target_pb2.TargetDescription | None = None
        self.problem: str | None = "has not answered yet"  # None: requests may be sent here
        self.num_in_flight = 0
        self._num_others = 0  # sequences there at the last poll that were not ours
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._stub = target_pb2_grpc.TargetStub(self._channel)
        self._calls: CallStream | None = None

    @property
    def load(self) -> int:
        """Sequences there now: ours, and those it reported beside them."""
        return self.num_in_flight + self._num_others

    async def poll(self) -> None:
        """Asks for the description and decides from it whether requests may be sent here."""
        try:
            self.description = await self._stub.Describe(types_pb2.DescribeRequest(), timeout=POLL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self.description = None
            self._set_problem(f"does not answer ({error.code().name})")
            return
        load = self.description.load
        self._num_others = max(0, load.num_running + load.num_waiting - self.num_in_flight)
        fingerprint = self.description.model.tokenizer_fingerprint
        if fingerprint == self._tokenizer_fingerprint:
            self._set_problem(None)
        else:
            self._set_problem(
                f"its tokenizer has the fingerprint {fingerprint[:64] or 'none'}, the router's has "
                f"{self._tokenizer_fingerprint}: start both with the same model"
            )

    async def poll_forever(self) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await self.poll()

    async def generate(self, request: target_pb2.GenerateRequest) -> AsyncGenerator[CallReply, None]:
        """Streams the replies to `request`, up to one with a finish reason. Closing the iterator frees the sequence.

        What has not been taken yet is merged: at most one reply waits. Raises OutriderError.
        """
        if self._calls is None or self._calls.has_ended:
            self._calls = CallStream(self._stub.GenerateMany(), self._translate)
        call = self._calls.start(request)
        self.num_in_flight += 1
        try:
            while not call.has_ended:
                yield await call.take()
        finally:
            self.num_in_flight -= 1
            call.cancel()

    async def close(self) -> None:
        if self._calls is not None:
            await self._calls.close()
        await self._channel.close()

    def _translate(self, error: OutriderError) -> OutriderError:
        """What the client is told. Only a message about the request is passed on; others may hold secrets."""
        if isinstance(error, InvalidRequestError):
            return error
        logger.warning("target %s: %s: %s", self.address, error.grpc_code.name, error.message)
        if isinstance(error, OverloadedError):
            return OverloadedError("the target's queue is full; retry later")
        if isinstance(error, UnavailableError):
            # The other replicas are chosen until it has answered a poll.
            self._set_problem("was lost")
            return UnavailableError("the target worker was lost; retry")
        return InternalError("the target worker failed")

    def _set_problem(self, problem: str | None) -> None:
        if problem != self.problem:
            if problem is None:
                logger.info("target %s is up", self.address)
            else:
                logger.warning("target %s is not used: %s", self.address, problem)
        self.problem = problem


class ReplicaPool:
    """The replicas at `addresses`, polled in the background while the pool is entered."""

    def __init__(self, addresses: Sequence[str], tokenizer_fingerprint: str) -> None:
        self.replicas: tuple[Replica, ...] = ()
        self._addresses = tuple(addresses)
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._polls: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> ReplicaPool:
        self.replicas = tuple(Replica(address, self._tokenizer_fingerprint) for address in self._addresses)
        await asyncio.gather(*(replica.poll() for replica in self.replicas))
        self._polls = [asyncio.create_task(replica.poll_forever()) for replica in self.replicas]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for poll in self._polls:
            poll.cancel()
        await asyncio.gather(*self._polls, return_exceptions=True)
        for replica in self.replicas:
            with contextlib.suppress(grpc.aio.BaseError):
                await replica.close()

    @property
    def usable(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.problem is None]

    def limits(self) -> Limits:
        """Raises UnavailableError when no replica can answer."""
        descriptions = [replica.description for replica in self.usable if replica.description is not None]
        if not descriptions:
            raise UnavailableError(_NO_TARGET)
        return Limits(
            vocab_size=min(description.model.vocab_size for description in descriptions),
            max_model_len=min(description.model.max_model_len for description in descriptions),
            max_speculative_tokens=min(description.max_speculative_tokens for description in descriptions),
        )

    def choose(self) -> Replica:
        """The least loaded replica. Raises UnavailableError when none can answer."""
        usable = self.usable
        if not usable:
            raise UnavailableError(_NO_TARGET)
        return min(usable, key=lambda replica: replica.load)
