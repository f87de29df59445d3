"""gRPC `Draft`: converts and delegates to the draft worker's loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import TYPE_CHECKING

import grpc
from google.protobuf.message import DecodeError

from cluster.drafters.base import Drafter
from cluster.drafting.worker import DraftWorker
from cluster.wire.codec import decode_request, encode_reply
from cluster.wire.messages import SpeculateReply
from cluster.wire.outbox import Outbox
from cluster.wire.version import WIRE_VERSION
from protos.speculation.v1 import draft_pb2, draft_pb2_grpc, types_pb2
from services.worker import describe_machine, new_epoch

if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[draft_pb2.SpeculateRequest, draft_pb2.SpeculateReply]
    _DescribeContext = grpc.aio.ServicerContext[types_pb2.DescribeRequest, Awaitable[draft_pb2.DraftDescription]]


_MAX_WAITING_BYTES = 2**20  # unread requests of a link; the last one may exceed it
_REQUEST_BYTES = 1024  # minimum cost of a request
_WAIT_SECONDS = 0.002
_LAST_WRITE_SECONDS = 5.0


class DraftServicer(draft_pb2_grpc.DraftServicer):
    def __init__(
        self,
        worker: DraftWorker,
        drafter: Drafter,
        model: types_pb2.ModelDescription,
        advertised_address: str = "",
        metrics_url: str = "",
    ) -> None:
        self._worker = worker
        self._drafter = drafter
        self._model = model
        self._advertised_address = advertised_address
        self._metrics_url = metrics_url
        self._epoch = new_epoch()
        self._is_draining = False

    @property
    def error(self) -> BaseException | None:
        """The error that ended the draft worker's loop, if any."""
        return self._worker.error

    @property
    def is_stuck(self) -> bool:
        """Always False: coordinators detect missing proposals themselves, and draft elsewhere."""
        return False

    async def drain(self, seconds: float) -> None:
        """Returns at once: when the streams end, the coordinators continue elsewhere with all their tokens."""
        self._is_draining = True

    async def Speculate(  # type: ignore[override]  # a handler that writes, not an iterator: gRPC takes both
        self, request_iterator: AsyncIterator[draft_pb2.SpeculateRequest], context: _Context
    ) -> None:
        outbox: Outbox[SpeculateReply] = Outbox()
        link = self._worker.attach(outbox.put)
        writing = asyncio.Lock()
        reader = asyncio.create_task(self._read(request_iterator, link))
        writer = asyncio.create_task(_write(outbox, context, writing))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            reader.cancel()  # before the link is detached: a later request would open sequences that nobody closes
            self._worker.detach(link)
            outbox.close()
            # Sending a status during a write is an error in gRPC. Peers that do not read are not waited for.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(writing.acquire(), _LAST_WRITE_SECONDS)
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
        if not writer.cancelled():
            writer.result()  # raises what ended it, which ends the stream with an error
        if not reader.cancelled() and (fault := reader.result()):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, fault)

    async def _read(self, messages: AsyncIterator[draft_pb2.SpeculateRequest], link: int) -> str:
        """Passes the requests of `link` on until they end. Returns why one is unusable; "": all were usable."""
        try:
            async for message in messages:
                self._worker.receive(link, decode_request(message), message.ByteSize() + _REQUEST_BYTES)
                # gRPC's flow control holds a flood back in the peer.
                while self._worker.num_waiting_bytes(link) > _MAX_WAITING_BYTES:  # noqa: ASYNC110  # its thread has no event
                    await asyncio.sleep(_WAIT_SECONDS)
        except (ValueError, DecodeError) as error:
            return str(error)
        return ""

    async def Describe(
        self, request: types_pb2.DescribeRequest, context: _DescribeContext
    ) -> draft_pb2.DraftDescription:
        return draft_pb2.DraftDescription(
            model=self._model,
            load=types_pb2.Load(
                num_running=self._worker.num_sequences,
                num_used_blocks=self._drafter.num_used_blocks,
                num_blocks=self._drafter.num_blocks,
            ),
            epoch=self._epoch,
            is_draining=self._is_draining,
            advertised_address=self._advertised_address,
            wire_version=WIRE_VERSION,
            machine=describe_machine(self._metrics_url),
            is_one_pass=self._drafter.is_one_pass,
        )


async def _write(outbox: Outbox[SpeculateReply], context: _Context, writing: asyncio.Lock) -> None:
    while True:
        reply = encode_reply(await outbox.take())
        async with writing:
            try:
                await context.write(reply)
            except grpc.aio.BaseError:
                return  # the peer has gone, as the stream's reader will notice; it may be cancelled before that
