"""Answers that end when their client disconnects: server-sent events, and cancellable work."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from cluster.errors import OutriderError
from services.router.anthropic_errors import is_anthropic
from services.router.errors import CLIENT_CLOSED_REQUEST, envelope_for, note_error

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"
# Seconds of silence before a comment is sent. Proxies and clients close a silent connection: AWS's load balancers and
# nginx after 60 s, some clients after 30 s. An error before the first comment still gets its own HTTP status.
FIRST_COMMENT_S = 10.0
COMMENT_S = 15.0


def event(value: Mapping[str, Any]) -> bytes:
    """Returns `value` as one server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


def named_event(name: str, value: Mapping[str, Any]) -> bytes:
    """Returns `value` as one server-sent event called `name`."""
    return b"event: " + name.encode() + b"\ndata: " + to_json(value) + b"\n\n"


def error_event(scope: Scope, error: OutriderError) -> bytes:
    """Returns the event that ends a stream with `error`, as the request's API has it."""
    value = envelope_for(scope, error)
    return named_event("error", value) if is_anthropic(scope["path"]) else event(value)


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. Cancels it and raises ClientDisconnect if the client disconnects.

    The request's body must have been read.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends `events` as they come, and closes the generator as soon as the client disconnects.

    The status line is sent with the first event, so an error raised before it still gets its own status. After
    FIRST_COMMENT_S seconds without an event the status line is sent with a comment instead, because proxies close
    silent connections. Further comments follow after every COMMENT_S seconds of silence.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str] | None = None,
        failure: Callable[[OutriderError], bytes] | None = None,
    ) -> None:
        """`failure` returns the event for an error after the stream's start; None: it is raised."""
        # Without x-accel-buffering nginx buffers events.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"} | dict(headers or {}))
        del self.headers["content-length"]
        self._events = events
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnected(receive, self._send_all(scope, send))
        except ClientDisconnect:
            note_outcome(scope, CLIENT_CLOSED_REQUEST)

    async def _send_all(self, scope: Scope, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        body = _Body(start, send)
        commenting = asyncio.create_task(body.send_comments())
        try:
            async with contextlib.aclosing(self._events) as events:
                async for data in events:
                    await body.send(data)
        except OutriderError as error:
            if not body.has_begun or self._failure is None:
                raise
            note_outcome(scope, error.http_status)
            note_error(scope, error)
            await body.send(self._failure(error))
        finally:
            commenting.cancel()
        await body.send(b"", is_last=True)


class _Body:
    """Sends the status line and the body of a stream of events."""

    def __init__(self, start: Message, send: Send) -> None:
        self.has_begun = False
        self._start = start
        self._send = send
        self._sending = asyncio.Lock()  # keeps events and comments in order while a send waits for a slow client
        self._sent_at = time.monotonic()

    async def send(self, data: bytes, *, is_last: bool = False) -> None:
        async with self._sending:
            self._sent_at = time.monotonic()
            if not self.has_begun:
                await self._send(self._start)
                self.has_begun = True  # set after the send: a comment may be cancelled while it waits
            await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def send_comments(self) -> None:
        """Sends a comment after each period of silence, until cancelled."""
        while True:
            silence_s = COMMENT_S if self.has_begun else FIRST_COMMENT_S
            rest_s = self._sent_at + silence_s - time.monotonic()
            if rest_s > 0:
                await asyncio.sleep(rest_s)
            else:
                await self.send(_COMMENT)


class NotedSend:
    """A `send` that passes messages on and records the answer's HTTP status."""

    def __init__(self, send: Send) -> None:
        self.status: int | None = None  # None: the answer has not begun
        self._send = send

    def __call__(self, message: Message) -> Awaitable[None]:  # not async: saves a coroutine per chunk
        if message["type"] == "http.response.start":
            self.status = message["status"]
        return self._send(message)


def note_outcome(scope: Scope, code: int) -> None:
    """Sets the status that metrics and logs report, regardless of the one that was sent."""
    scope.setdefault("state", {})["outcome"] = code
