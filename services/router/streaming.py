"""Answering as long as there is someone to answer: server-sent events, and work that ends with its client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Mapping
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from services.router.errors import CLIENT_CLOSED_REQUEST

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(value: Mapping[str, Any]) -> bytes:
    """`value` as one server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or ClientDisconnect once the client is gone; then `work` has been cancelled.

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
    """Sends `events` as they come; closes them at once when the client leaves.

    The status line is sent with the first event, so that an error raised before it gets a status of its own.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(headers={"cache-control": "no-cache"} | dict(headers or {}))
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnected(receive, self._send_all(send))
        except ClientDisconnect:
            note_outcome(scope, CLIENT_CLOSED_REQUEST)

    async def _send_all(self, send: Send) -> None:
        started = False
        async with contextlib.aclosing(self._events) as events:
            async for data in events:
                if not started:
                    started = True
                    await send(
                        {
                            "type": "http.response.start",
                            "status": self.status_code,
                            "headers": self.raw_headers,
                        }
                    )
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class NotedSend:
    """Passes messages on, and notes the status that the answer begins with."""

    def __init__(self, send: Send) -> None:
        self.status: int | None = None  # None: the answer has not begun
        self._send = send

    def __call__(self, message: Message) -> Awaitable[None]:  # no coroutine of its own, for every chunk
        if message["type"] == "http.response.start":
            self.status = message["status"]
        return self._send(message)


def note_outcome(scope: Scope, code: int) -> None:
    """Has the request counted as `code`, whatever status its answer began with, if it began at all."""
    scope.setdefault("state", {})["outcome"] = code
