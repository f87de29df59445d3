"""HTTP for potentially hostile clients: uvicorn's protocol, with limits.

| a client | its connection |
| --- | --- |
| opens more connections than `Connections` allows | 503, closed |
| sends nothing, or its headers too slowly | closed, with 408 if a request has begun |
| sends headers without end, or bytes that are neither headers nor body | 431, closed |
| sends something other than HTTP | 400, closed |
| sends requests without waiting for answers | closed beyond a few |
| does not read its answer | closed |

The module `body`, which reads bodies, enforces their deadline. If a request is answered before its body is complete,
the connection stays open for a moment and the rest is discarded: if it were closed at once, a client that is still
sending would lose the answer.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import httptools
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from cluster.errors import InvalidRequestError, OutriderError, OverloadedError
from services.router.errors import HeadersTooLargeError, RequestTimeoutError, error_response
from services.router.http.connections import Connections

MAX_HEADERS = 128
MAX_HEADER_BYTES = 65_536  # size of a request's first line and headers
_MAX_PIPELINED = 8
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})
_LINGER_SECONDS = 2.0
_WRITE_TIMEOUT_SECONDS = 30.0
_LEAST_READ_BYTES = 65_536  # bytes that a client must read within each write timeout, unless fewer are left


class BoundedHttpProtocol(HttpToolsProtocol):
    def __init__(self, connections: Connections, counted_as: str | None = None, **more: Any) -> None:
        """`counted_as`: host for which `connections` has counted this connection; None: not counted yet."""
        super().__init__(**more)
        self._connections = connections
        self._limits = connections.config
        self._host = counted_as
        self._running: RequestResponseCycle | None = None
        self._awaits_head = True
        self._is_in_head = False
        self._num_head_bytes = 0
        self._num_raw_bytes = 0  # bytes received since the end of the headers or the last part of a body
        self._skipped_framing: list[tuple[bytes, bytes]] = []  # framing headers of an upgrade request with a body
        self._is_repeating = False  # whether a new parser is reading the head of such a request again
        self._refusal: OutriderError | None = None
        self._is_lingering = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._num_unread_bytes = 0  # unread bytes when the write timer was set

    # Called by the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._host is None:
            host = self.client[0] if self.client else ""
            if not self._connections.enter(host):
                self._refuse(OverloadedError("there are too many connections; retry later"))
                return
            self._host = host
        self._set_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_requests()
        for timer in (self._head_timer, self._write_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()
        self.leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_lingering or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._num_raw_bytes += len(data)
        while data:
            rest = b""
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                rest = data[upgrade.args[0] :]
                self._go_on_with_http()
            except httptools.HttpParserError:
                self._close_for("invalid", self._refusal or InvalidRequestError("this is not an HTTP/1.1 request"))
                return
            data = rest
        if self._num_raw_bytes > MAX_HEADER_BYTES:
            self._close_for("header_size", _too_large())
        elif self._awaits_head and self._head_timer is None and (self._is_in_head or self._running is None):
            self._set_head_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None and not self.transport.is_closing():
            self._write_timer.cancel()
            self._write_timer = None

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self._is_repeating:
            return
        super().on_message_begin()
        self._is_in_head = True
        self._num_head_bytes = 0

    def on_url(self, url: bytes) -> None:
        if self._is_repeating:
            return
        self._count_head_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:  # a trailer of a chunked body, which is ignored
            return
        self._count_head_bytes(len(name) + len(value) + 4)
        if len(self.headers) == MAX_HEADERS:
            self._refusal = HeadersTooLargeError(f"a request may have {MAX_HEADERS} headers")
            raise self._refusal
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_repeating:
            return
        if len(self.pipeline) == _MAX_PIPELINED:
            raise InvalidRequestError("too many requests without waiting for answers")
        self._is_in_head = self._awaits_head = False
        self._num_raw_bytes = 0
        self._unset_head_timer()
        super().on_headers_complete()
        self.cycle.transport = _Outlet(self)
        if self.parser.should_upgrade():
            self._skipped_framing = [(name, value) for name, value in self.headers if name in _FRAMING]

    def on_body(self, body: bytes) -> None:
        self._num_raw_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._skipped_framing:
            return
        self._num_raw_bytes = 0
        self._awaits_head = True
        super().on_message_complete()

    def _go_on_with_http(self) -> None:
        """Ignores an upgrade to another protocol and reads the request's body as HTTP.

        httptools stops at an upgrade. A new parser gets a head with the same framing headers but without the upgrade.
        """
        framing, self._skipped_framing = self._skipped_framing, []
        if not framing:
            return
        self.parser = httptools.HttpRequestParser(self)
        lines = [b"POST / HTTP/1.1", *(name + b": " + value for name, value in framing)]
        self._is_repeating = True
        try:
            self.parser.feed_data(b"\r\n".join(lines) + b"\r\n\r\n")
        finally:
            self._is_repeating = False

    # Called by requests.

    def on_response_complete(self) -> None:
        self._running = None
        if self._is_lingering:
            self.server_state.total_requests += 1
            self.flow.resume_reading()
        else:
            super().on_response_complete()

    def close_after_answer(self) -> None:
        if self._awaits_head:
            self._close()
        else:
            self._linger()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, functools.partial(_close_if_unread, cycle, app))

    # Ends of connections.

    def leave(self) -> None:
        """Stops counting this connection."""
        if self._host is not None:
            self._connections.leave(self._host)
            self._host = None

    def _count_head_bytes(self, number: int) -> None:
        self._num_head_bytes += number
        if self._num_head_bytes > MAX_HEADER_BYTES:
            self._refusal = _too_large()
            raise self._refusal

    def _set_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.header_timeout_seconds, self._on_head_timeout)

    def _unset_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        error = RequestTimeoutError(f"the headers did not arrive within {self._limits.header_timeout_seconds:g} s")
        self._close_for("header_timeout", error if self._is_in_head else None)

    def _close_for(self, reason: str, error: OutriderError | None) -> None:
        self._connections.count_closed(reason)
        self._refuse(error)

    def _refuse(self, error: OutriderError | None) -> None:
        """Closes the connection. Sends `error` first, unless an answer has begun."""
        has_begun = self._running is not None and self._running.response_started
        self._end_requests()
        if has_begun:
            self.transport.abort()
            return
        if error is not None:
            self.transport.write(_raw(error_response(error)))
        self._linger()

    def _end_requests(self) -> None:
        """Marks the running request as disconnected; with pipelining, uvicorn only notifies the last one."""
        self.pipeline.clear()
        for cycle in (self._running, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _linger(self) -> None:
        """Discards input until the client closes the connection, or closes it after _LINGER_SECONDS."""
        self._is_lingering = True
        self._unset_head_timer()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger_timer = self.loop.call_later(_LINGER_SECONDS, self._close)

    def _close(self) -> None:
        self._unset_head_timer()
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._watch_writing()

    def _watch_writing(self) -> None:
        if self._write_timer is None:
            self._num_unread_bytes = self.transport.get_write_buffer_size()
            self._write_timer = self.loop.call_later(_WRITE_TIMEOUT_SECONDS, self._on_write_timeout)

    def _on_write_timeout(self) -> None:
        self._write_timer = None
        num_unread_bytes = self.transport.get_write_buffer_size()
        if not num_unread_bytes:
            return
        if num_unread_bytes > self._num_unread_bytes - _LEAST_READ_BYTES:
            self._connections.count_closed("write_timeout")
            self.transport.abort()
        else:
            self._watch_writing()


class _Outlet(asyncio.Transport):
    """Transport for one request's answer; closing it may linger instead of closing at once."""

    def __init__(self, protocol: BoundedHttpProtocol) -> None:
        super().__init__()
        self._protocol = protocol
        self._transport = protocol.transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._protocol.close_after_answer()


async def _close_if_unread(
    cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """Closes the connection after an answer that begins before the body is complete.

    Reading the rest of the body would only cost time.
    """

    async def send_and_close(message: Message) -> None:
        if message["type"] == "http.response.start" and cycle.more_body:
            cycle.keep_alive = False
        await send(message)

    await app(scope, receive, send_and_close if cycle.more_body else send)


def _too_large() -> HeadersTooLargeError:
    return HeadersTooLargeError(f"the headers are over the limit of {MAX_HEADER_BYTES} bytes")


def _raw(response: Response) -> bytes:
    headers = [*response.raw_headers, (b"connection", b"close")]
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    return STATUS_LINE[response.status_code] + lines + b"\r\n" + bytes(response.body)
