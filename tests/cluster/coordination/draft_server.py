"""The draft worker's end of a link: a real server on loopback that says what the test tells it to."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator
from typing import Any

import grpc

from cluster.transport.listening import Listener
from cluster.wire.codec import decode_request, encode_reply
from cluster.wire.messages import SpeculateReply, SpeculateRequest
from protos.speculation.v1 import draft_pb2, draft_pb2_grpc, types_pb2
from tests.background_loop import BackgroundLoop
from tests.waiting import WAIT_S, wait_until

FINGERPRINT = "the same tokenizer"

_DEAF_S = 0.5


class DraftServer(draft_pb2_grpc.DraftServicer):
    """Stopped and started again, it has the same address."""

    def __init__(self, loop: BackgroundLoop, fingerprint: str = FINGERPRINT, listener: Listener | None = None) -> None:
        self.fingerprint = fingerprint
        self.name = "scripted"
        self.address = "127.0.0.1:0"
        self.messages: queue.Queue[draft_pb2.SpeculateRequest] = queue.Queue()
        self.num_streams = 0
        self.num_streams_ever = 0
        self.is_deaf = False  # streams end after a while, and nothing on them is read
        self._loop = loop
        self._listener = listener or Listener()
        self.start()

    def start(self) -> None:
        self._loop.run(self._start())

    async def _start(self) -> None:
        self._server = self._listener.new_server([("grpc.so_reuseport", 0)])
        draft_pb2_grpc.add_DraftServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._listener.open_port(self._server, self.address)}"
        await self._server.start()

    def stop(self) -> None:
        self._loop.run(self._server.stop(None))

    def message(self) -> draft_pb2.SpeculateRequest:
        """Waits for the next one."""
        return self.messages.get(timeout=WAIT_S)

    def request(self) -> SpeculateRequest:
        """Waits for the next message, and reads it."""
        return decode_request(self.message())

    def reply(self, reply: SpeculateReply) -> draft_pb2.SpeculateReply:
        """Sends it on the stream that began last; returns the message."""
        message = encode_reply(reply)
        self.send(message)
        return message

    def send(self, message: draft_pb2.SpeculateReply) -> None:
        wait_until(lambda: self.num_streams > 0)  # a link is up before its worker knows
        self._loop.run(self.stream.write(message))

    def end(self, code: grpc.StatusCode, details: str) -> None:
        """The stream that began last ends with that."""
        wait_until(lambda: self.num_streams > 0)
        self._loop.run(self._end(code, details))

    async def _end(self, code: grpc.StatusCode, details: str) -> None:
        with contextlib.suppress(grpc.aio.AbortError):
            await self.stream.abort(code, details)

    async def Describe(self, request: types_pb2.DescribeRequest, context: Any) -> draft_pb2.DraftDescription:
        model = types_pb2.ModelDescription(name=self.name, tokenizer_fingerprint=self.fingerprint)
        return draft_pb2.DraftDescription(model=model)

    async def Speculate(
        self,
        request_iterator: AsyncIterator[draft_pb2.SpeculateRequest],
        context: grpc.aio.ServicerContext[draft_pb2.SpeculateRequest, draft_pb2.SpeculateReply],
    ) -> None:
        self.stream = context
        self.num_streams += 1
        self.num_streams_ever += 1
        try:
            if self.is_deaf:
                await context.send_initial_metadata(())
                await asyncio.sleep(_DEAF_S)
                return
            async for message in request_iterator:
                self.messages.put(message)
        finally:
            self.num_streams -= 1
