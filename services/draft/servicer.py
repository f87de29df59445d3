"""gRPC `Draft`: converts and delegates to the draft worker's loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import grpc
from google.protobuf.message import DecodeError

from cluster.config import Config
from cluster.drafting.worker import DraftWorker
from cluster.telemetry.metrics import Reading
from cluster.wire.codec import decode_request, encode_reply
from cluster.wire.messages import SpeculateReply
from cluster.wire.outbox import Outbox
from cluster.wire.version import WIRE_VERSION
from protos.speculation.v1 import draft_pb2, draft_pb2_grpc, types_pb2
from services.draft.versions import Version, make_next, make_version, promote, take_back
from services.worker import describe_machine, errors_as_status, new_epoch

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[draft_pb2.SpeculateRequest, draft_pb2.SpeculateReply]
    _DescribeContext = grpc.aio.ServicerContext[types_pb2.DescribeRequest, Awaitable[draft_pb2.DraftDescription]]
    _LoadContext = grpc.aio.ServicerContext[draft_pb2.LoadDraftRequest, Awaitable[draft_pb2.DraftDescription]]


_MAX_WAITING_BYTES = 2**20  # unread requests of a link; the last one may exceed it
_REQUEST_BYTES = 1024  # minimum cost of a request
_WAIT_SECONDS = 0.002
_LAST_WRITE_SECONDS = 5.0


class DraftServicer(draft_pb2_grpc.DraftServicer):
    def __init__(self, version: Version, advertised_address: str = "", configured: Config | None = None) -> None:
        """`configured`: the configuration whose draft a rollback returns to; None: it is that of `version`."""
        self.version = version
        self.metrics_url = ""
        self._advertised_address = advertised_address
        self._earlier = configured  # of the version before the one that was loaded; None after a rollback
        self._changing = asyncio.Lock()
        self._replaced = asyncio.Event()  # ends the streams of the version
        self._epoch = new_epoch()
        self._is_draining = False

    def readings(self) -> Iterator[Reading]:
        """Any thread."""
        return self.version.readings()

    @property
    def error(self) -> BaseException | None:
        """The error that ended the draft worker's loop, if any."""
        return self.version.worker.error

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
        worker = self.version.worker
        link = worker.attach(outbox.put)
        writing = asyncio.Lock()
        replaced = asyncio.create_task(self._replaced.wait())
        reader = asyncio.create_task(_read(worker, request_iterator, link))
        writer = asyncio.create_task(_write(outbox, context, writing))
        try:
            await asyncio.wait((reader, writer, replaced), return_when=asyncio.FIRST_COMPLETED)
        finally:
            reader.cancel()  # before the link is detached: a later request would open sequences that nobody closes
            replaced.cancel()
            worker.detach(link)
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

    async def Describe(
        self, request: types_pb2.DescribeRequest, context: _DescribeContext
    ) -> draft_pb2.DraftDescription:
        return self._description()

    async def LoadDraft(self, request: draft_pb2.LoadDraftRequest, context: _LoadContext) -> draft_pb2.DraftDescription:
        """Serves another version. Links reconnect, and open their sequences again with all their tokens."""
        async with errors_as_status(context):
            # A caller that leaves does not end the load, which has the lock until then.
            await asyncio.shield(asyncio.create_task(self._change(request)))
        return self._description()

    async def _change(self, request: draft_pb2.LoadDraftRequest) -> None:
        async with self._changing:
            before, earlier = self.version, self._earlier
            if not request.is_rollback:
                after = await _in_thread(lambda: make_next(before, request.folder))
            elif earlier is not None:
                tokenizer = before.description.tokenizer_fingerprint
                after = await _in_thread(lambda: make_version(earlier, tokenizer))
            else:
                after = before
            if request.promotes:
                promote(before.config, request.folder)
            if request.is_rollback and after is not before:
                take_back(before.config, after.config)
            if after is not before:
                self.version = after
                after.worker.start()
                self._replaced.set()
                self._replaced = asyncio.Event()
                self._earlier = None if request.is_rollback else before.config
                await asyncio.to_thread(before.worker.stop)
                logger.info("serving %s in place of %s", after.description.name, before.description.name)

    def _description(self) -> draft_pb2.DraftDescription:
        drafter = self.version.drafter
        return draft_pb2.DraftDescription(
            model=self.version.description,
            load=types_pb2.Load(
                num_running=self.version.worker.num_sequences,
                num_used_blocks=drafter.num_used_blocks,
                num_blocks=drafter.num_blocks,
            ),
            epoch=self._epoch,
            is_draining=self._is_draining,
            advertised_address=self._advertised_address,
            wire_version=WIRE_VERSION,
            machine=describe_machine(self.metrics_url),
            is_one_pass=drafter.is_one_pass,
        )


async def _in_thread(work: Callable[[], Version]) -> Version:
    """Returns the result of `work`, in a thread that the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Version] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            tell = partial(future.set_exception, error)
        else:
            tell = partial(future.set_result, result)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell)

    threading.Thread(target=run, name="load-draft", daemon=True).start()
    return await future


async def _read(worker: DraftWorker, messages: AsyncIterator[draft_pb2.SpeculateRequest], link: int) -> str:
    """Passes the requests of `link` on until they end. Returns why one is unusable; "": all were usable."""
    try:
        async for message in messages:
            worker.receive(link, decode_request(message), message.ByteSize() + _REQUEST_BYTES)
            # gRPC's flow control holds a flood back in the peer.
            while worker.num_waiting_bytes(link) > _MAX_WAITING_BYTES:  # noqa: ASYNC110  # its thread has no event
                await asyncio.sleep(_WAIT_SECONDS)
    except (ValueError, DecodeError) as error:
        return str(error)
    return ""


async def _write(outbox: Outbox[SpeculateReply], context: _Context, writing: asyncio.Lock) -> None:
    while True:
        reply = encode_reply(await outbox.take())
        async with writing:
            try:
                await context.write(reply)
            except grpc.aio.BaseError:
                return  # the peer has gone, as the stream's reader will notice; it may be cancelled before that
