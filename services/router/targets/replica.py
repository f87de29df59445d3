"""One replica of the target: its status, its calls, and their end when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Literal, NamedTuple

import grpc

from cluster.coordination.backoff import Backoff
from cluster.errors import (
    InvalidRequestError,
    NotFoundError,
    OutriderError,
    OverloadedError,
    UnavailableError,
    from_status,
)
from cluster.transport.dialing import KEEPALIVE, PLAIN, Dialer
from cluster.wire.parsing import parse
from cluster.wire.replies import CallReply
from protos.speculation.v1 import target_pb2, target_pb2_grpc, types_pb2
from services.router.targets.affinity import RoutingKey
from services.router.targets.call_stream import CallStream
from services.router.targets.prefixes import CHUNK_TOKENS, CachedPrefixes
from services.router.targets.reply_limits import check_description
from services.router.targets.traits import Traits

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
POLL_TIMEOUT_S = 1.5  # after two in a row, within 4 s with the intervals, a worker that is silent is abandoned
_SILENT_POLLS = 2
_ADAPTER_TIMEOUT_S = 300.0
_MAX_MESSAGE_BYTES = 16 * 2**20
_MAX_REPLY_BYTES = 128 * 2**20  # a message has the tokens of all sequences since the last one
_REPAIR_SECONDS = 30.0  # maximum pause after an unusable message: the worker will probably send another one
_STABLE_SECONDS = 30.0  # a stream that lived this long did not end because of its first replies
_LOG_SECONDS = 10.0  # least time between two lines about the same error of calls
_MAX_REASON_CHARACTERS = 200
_SERVICE = "speculation.v1.Target"
# Descriptions and observations are parsed by the event loop, so they are limited to a size that takes milliseconds.
_SERVICE_CONFIG = {
    "methodConfig": [
        {"name": [{"service": _SERVICE, "method": method}], "maxResponseMessageBytes": 2**20}
        for method in ("Describe", "Observe")
    ]
}

_CALL_OPTIONS = (
    *KEEPALIVE,  # descriptions arrive every half second, so a ping is sent only when the other side has gone silent
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_REPLY_BYTES),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.use_local_subchannel_pool", 1),
)

ReplicaStatus = Literal["up", "down", "draining", "stuck", "refused"]
"refused: it answers, but does not match the pool or the router."

LossReason = Literal["lost", "draining", "stuck", "failed", "unloaded"]
_LOSS_MESSAGES: dict[LossReason, str] = {
    "lost": "the target worker was lost; retry",
    "draining": "the target worker is shutting down; retry",
    "stuck": "the target worker's engine makes no progress; retry",
    "failed": "the target worker failed",
    "unloaded": "the target worker has unloaded the adapter; retry",
}
_IS_DRAINING = "is draining"
_PATIENT_POLLS = 120  # about a minute


class AdapterRef(NamedTuple):
    """A LoRA adapter that a request is for."""

    name: str
    fingerprint: str  # fingerprint of its contents

    @classmethod
    def of(cls, request: target_pb2.GenerateRequest) -> AdapterRef | None:
        return cls(request.adapter, request.adapter_fingerprint) if request.adapter else None


class ReplicaLostError(UnavailableError):
    """A replica will not finish a call; another can continue it from its tokens.

    lost: its stream broke, it was restarted, or it is silent although it is connected;
    draining: it is shutting down, and refused or gave up the call, or closed the stream;
    stuck: it reports that its engine makes no progress;
    failed: it ended the call with an error that is not the request's;
    unloaded: it refused the call, because it no longer holds the call's adapter.
    """

    def __init__(self, reason: LossReason, *, was_reached: bool = True) -> None:
        """`was_reached`: whether the call may have arrived at the replica."""
        super().__init__(_LOSS_MESSAGES[reason])
        self.reason = reason
        self.was_reached = was_reached

    def __copy__(self) -> ReplicaLostError:  # by default a copy is made from the message
        return ReplicaLostError(self.reason, was_reached=self.was_reached)


class Replica:
    """One target worker. Must be created inside a running event loop."""

    def __init__(
        self,
        address: str,
        tokenizer_fingerprint: str,
        object_to: Callable[[Replica], str | None] = lambda replica: None,
        notify: Callable[[], None] = lambda: None,
        dialer: Dialer = PLAIN,
    ) -> None:
        """`object_to` returns why the replica cannot be used with the others, or None.

        `notify` is called when its problem changes, or when it answers again after silence. `dialer` makes the channel.
        """
        self.address = address
        self.description: target_pb2.TargetDescription | None = None
        self.traits: Traits = ()  # as last reported; (): unknown
        self.adapters: dict[str, str] | None = None  # as last reported: fingerprints by name; None: never reported
        self.status: ReplicaStatus = "down"
        self.problem: str | None = "has not answered yet"  # None: it is up, requests may be sent here
        self.prefixes = CachedPrefixes()
        self.queued_tokens = 0  # of our prompts there that have no token of an answer yet, without those it has cached
        self.num_in_flight = 0
        self._num_foreign_sequences = 0  # sequences of other routers there at the last poll
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._object_to = object_to
        self._notify = notify
        self._dialer = dialer
        self._dialer_version = dialer.version
        self._channel = dialer.channel(address, _CALL_OPTIONS)
        self._stub = target_pb2_grpc.TargetStub(self._channel)
        self._began_at = 0.0  # when the last stream began
        self._pauses = Backoff()
        self._paused_until = 0.0
        self._unusable = ""  # why it is paused
        self._logged_at: dict[str, float] = {}  # when an error of calls was last logged, by its status
        self._calls: CallStream | None = None
        self._calls_epoch: int | None = None  # epoch of the worker that the stream was opened to; None: not known yet
        self._num_polls = 0
        self._newest_answered = -1
        self._num_silent_polls = 0
        self._has_answered = False  # whether it ever answered
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_closed = False

    def has(self, adapter: AdapterRef | None) -> bool:
        """Returns True if the replica can answer with `adapter`; None: with the base model."""
        return adapter is None or (self.adapters or {}).get(adapter.name) == adapter.fingerprint

    def forget(self, adapter: AdapterRef) -> None:
        """Records that the replica lacks `adapter`, until the next poll."""
        if self.adapters is not None and self.has(adapter):
            del self.adapters[adapter.name]

    async def load_adapter(self, name: str, path: str, *, replace: bool) -> str:
        """Makes the replica load an adapter from `path` on its disk. Returns the fingerprint. Raises OutriderError."""
        asked = target_pb2.LoadAdapterRequest(name=name, path=path, replace=replace)
        with self._admin_errors():
            reply: target_pb2.LoadAdapterReply = await self._stub.LoadAdapter(asked, timeout=_ADAPTER_TIMEOUT_S)
        return reply.fingerprint

    async def unload_adapter(self, name: str) -> int:
        """Makes the replica unload an adapter. Returns the number of requests that still run with it.

        Raises OutriderError.
        """
        asked = target_pb2.UnloadAdapterRequest(name=name)
        with self._admin_errors():
            reply: target_pb2.UnloadAdapterReply = await self._stub.UnloadAdapter(asked, timeout=_ADAPTER_TIMEOUT_S)
        return reply.num_running

    async def observe(self, request: target_pb2.ObserveRequest) -> target_pb2.Observation | None:
        """Returns the replica's current work; None if it does not answer, or its version has no such call."""
        try:
            observation: target_pb2.Observation = await self._stub.Observe(request, timeout=POLL_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
        return observation

    @contextlib.contextmanager
    def _admin_errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise UnavailableError("it runs an older version, without adapters") from error
            raise from_status(error.code().value[0], error.details() or error.code().name) from error

    @property
    def load(self) -> int:
        """Number of sequences at the replica: this router's, and the others that it reported."""
        return self.num_in_flight + self._num_foreign_sequences

    @property
    def is_new(self) -> bool:
        """True until its first poll has ended."""
        return self._newest_answered < 0

    @property
    def is_silent(self) -> bool:
        """True if the last poll was not answered in time: other replicas are preferred."""
        return self._num_silent_polls > 0

    async def poll(self) -> None:
        """Polls the description. Decides if the replica may get requests, and if it is lost."""
        number, self._num_polls = self._num_polls, self._num_polls + 1
        await self._follow_certificates()
        failure: grpc.aio.AioRpcError | None = None
        answer: bytes | None = None
        try:
            describe: grpc.aio.UnaryUnaryMultiCallable[types_pb2.DescribeRequest, bytes] = self._channel.unary_unary(
                f"/{_SERVICE}/Describe", types_pb2.DescribeRequest.SerializeToString
            )
            answer = await describe(types_pb2.DescribeRequest(), timeout=POLL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            failure = error
        if number <= self._newest_answered:
            return  # a later poll has been answered, or the worker was lost since
        self._newest_answered = number
        if answer is not None:
            was_silent, self._num_silent_polls = self.is_silent, 0
            self._has_answered = True
            try:
                description = parse(target_pb2.TargetDescription, answer)
                check_description(description)
            except ValueError as error:
                self.description = None
                self._become("refused", f"its description is unusable: {error}"[:_MAX_REASON_CHARACTERS])
            else:
                self.description = description
                self._consider(description)
            if was_silent:
                self._notify()
            return
        assert failure is not None
        self._count_silence(failure.code())
        if self.problem is None and 0 < self._num_silent_polls < _SILENT_POLLS:
            # A short delay may be the cause, and this may be the only target.
            logger.info("target %s does not answer: other targets are preferred", self.address)
            return
        self.description = None
        refusal = self._dialer.explain(failure)
        self._become("down", f"does not answer ({failure.code().name})" + (f": {refusal}" if refusal else ""))
        if number == _PATIENT_POLLS and not self._has_answered:
            logger.warning("target %s has never answered: check that it is at this address", self.address)

    async def _follow_certificates(self) -> None:
        """Opens a new channel if the certificates have changed and the replica is down.

        A channel that works or has calls is kept.
        """
        version = self._dialer.version
        if version == self._dialer_version or self.status != "down" or self.num_in_flight:
            return
        old, self._channel = self._channel, self._dialer.channel(self.address, _CALL_OPTIONS)
        self._stub = target_pb2_grpc.TargetStub(self._channel)
        self._dialer_version = version
        await old.close()

    async def poll_forever(self) -> None:
        while True:
            try:
                await self.poll()
            except Exception:  # for any exception: without polls a replica would keep its last status forever
                logger.exception("polling target %s failed", self.address)
                self._become("down", "polling failed; see the router's log")
            await asyncio.sleep(POLL_INTERVAL_S)

    async def generate(
        self, request: target_pb2.GenerateRequest, key: RoutingKey | None = None
    ) -> AsyncGenerator[CallReply, None]:
        """Yields the replies to `request`, up to one with a finish reason.

        Replies that have not been taken yet are merged, so at most one waits. Closing the generator frees the sequence.
        Raises OutriderError; it is ReplicaLostError if another replica can continue.
        """
        if self._is_closed:  # it was removed after it had been chosen
            raise ReplicaLostError("draining")
        if self._calls is None or self._calls.has_ended:
            epoch = self._calls_epoch = None if self.description is None else self.description.epoch
            vocab_size = None if self.description is None else self.description.model.vocab_size
            # The messages stay bytes, because gRPC logs a traceback for each one that it cannot parse.
            generate: grpc.aio.StreamStreamMultiCallable[target_pb2.GenerateCommands, bytes] = (
                self._channel.stream_stream(f"/{_SERVICE}/GenerateMany", target_pb2.GenerateCommands.SerializeToString)
            )
            self._calls = CallStream(generate(), self._translate, self._explain_end, epoch, vocab_size)
            self._began_at = time.monotonic()
        call = self._calls.start(request)
        del request  # it may be large, and its copy is on the way
        self.num_in_flight += 1
        self._is_idle.clear()
        num_queued = 0 if key is None else key.num_uncached(self)
        self.queued_tokens += num_queued
        try:
            while not call.has_ended:
                reply = await call.take()
                if num_queued and reply.token_ids and key is not None:  # the prompt is computed
                    self.queued_tokens -= num_queued
                    num_queued = 0
                    self.prefixes.add(key.hashes)
                yield reply
        finally:
            self.queued_tokens -= num_queued
            self.num_in_flight -= 1
            if self.num_in_flight == 0:
                self._is_idle.set()
            call.cancel()

    async def wait_idle(self) -> None:
        """Waits until no call of this router runs on the replica."""
        await self._is_idle.wait()

    async def close(self) -> None:
        self._is_closed = True
        if self._calls is not None:
            await self._calls.close()
        await self._channel.close()

    def _count_silence(self, failure: grpc.StatusCode) -> None:
        """Counts polls without an answer; ends all calls after _SILENT_POLLS in a row.

        The stream of a lost worker breaks by itself, but a hanging worker may stay connected forever.
        """
        if failure is not grpc.StatusCode.DEADLINE_EXCEEDED:
            self._num_silent_polls = 0
            return
        self._num_silent_polls += 1
        if self._num_silent_polls >= _SILENT_POLLS:
            self._give_up("lost")

    def _consider(self, description: target_pb2.TargetDescription) -> None:
        if self._calls_epoch not in (None, description.epoch):
            # Another worker answers at this address, and it does not have the sequences of the old stream.
            self._give_up("lost")
            self.prefixes.clear()
        self._calls_epoch = description.epoch
        if description.is_stuck:
            self._give_up("stuck")
        load = description.load
        self._num_foreign_sequences = max(0, load.num_running + load.num_waiting - self.num_in_flight)
        num_cacheable = load.num_blocks * description.block_size if description.caches_prefixes else 0
        self.prefixes.limit(num_cacheable // CHUNK_TOKENS)
        self.traits = tuple(sorted(description.traits.items()))
        self.adapters = dict(description.adapters)
        fingerprint = description.model.tokenizer_fingerprint
        if fingerprint != self._tokenizer_fingerprint:
            self._become(
                "refused",
                f"its tokenizer has the fingerprint {fingerprint[:64] or 'none'}, the router's has "
                f"{self._tokenizer_fingerprint}: start both with the same model",
            )
        elif time.monotonic() < self._paused_until:
            self._become("refused", self._unusable)
        elif description.is_stuck:
            self._become("stuck", "its engine makes no progress")
        elif description.is_draining:
            self._become("draining", _IS_DRAINING)
        elif objection := self._object_to(self):
            self._become("refused", objection)
        else:
            self._become("up", None)

    def _give_up(self, reason: LossReason) -> None:
        """Ends all calls on the replica, and frees their sequences if the worker is still connected."""
        if self._calls is not None and not self._calls.has_ended:
            logger.warning("target %s: its %d calls are abandoned: %s", self.address, self.num_in_flight, reason)
            self._calls.fail(ReplicaLostError(reason))

    def _explain_end(self, why: str | None) -> ReplicaLostError:
        """Returns the error of calls whose stream has ended.

        `why`: the reason; None if the worker closed the stream. Other replicas are chosen until this one answers a
        poll that is sent from now on.
        """
        self._newest_answered = self._num_polls - 1
        if why is None:  # a draining worker closes the stream when no call runs on it
            self._become("draining", _IS_DRAINING)
            return ReplicaLostError("draining")
        if time.monotonic() > self._began_at + _STABLE_SECONDS:
            self._pauses.succeeded()
        if self._calls is not None and self._calls.is_unusable:
            self._paused_until = time.monotonic() + self._pauses.failed(_REPAIR_SECONDS)
            self._unusable = f"it sent an unusable message: {why[:_MAX_REASON_CHARACTERS]}"
            self._become("refused", self._unusable)
        else:
            reason = why[:_MAX_REASON_CHARACTERS]
            logger.warning(
                "target %s: its stream with %d calls has ended: %s", self.address, self.num_in_flight, reason
            )
            self._become("down", "was lost")
        return ReplicaLostError("lost", was_reached=self._calls is not None and self._calls.has_begun)

    def _translate(self, error: OutriderError) -> OutriderError:
        """Returns the caller's error for an error that the target reports.

        Only messages about the request are passed on; others may contain secrets.
        """
        if isinstance(error, InvalidRequestError):
            return error
        status, now = error.grpc_code.name, time.monotonic()
        if now > self._logged_at.get(status, -_LOG_SECONDS) + _LOG_SECONDS:
            self._logged_at[status] = now
            logger.warning("target %s: %s: %s", self.address, status, error.message[:_MAX_REASON_CHARACTERS])
        if isinstance(error, NotFoundError):
            return ReplicaLostError("unloaded", was_reached=False)
        if isinstance(error, OverloadedError):
            return OverloadedError("the target is full; retry later")
        if isinstance(error, UnavailableError):
            self._become("draining", _IS_DRAINING)
            return ReplicaLostError("draining")
        return ReplicaLostError("failed")

    def _become(self, status: ReplicaStatus, problem: str | None) -> None:
        self.status = status
        if problem == self.problem:
            return
        if problem is None:
            logger.info("target %s is up", self.address)
        elif status == "down" and not self._has_answered:  # it may be loading its model, so this is not a warning
            logger.info("waiting for target %s: it %s", self.address, problem)
        else:
            logger.warning("target %s is not used: %s", self.address, problem)
        self.problem = problem
        self._notify()
