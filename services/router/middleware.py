"""What surrounds every request: its ID, and whether it is let in."""

from __future__ import annotations

import asyncio
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import OverloadedError, UnavailableError
from cluster.telemetry.metrics import RouterMetrics
from services.router.errors import envelope, error_response
from services.router.streaming import event, note_outcome

_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class RequestIds:
    """Gives every answer an `x-request-id`: the one that the client sent, if it is printable."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class Admission:
    """Counts the requests to `paths` and refuses those beyond `limit` in flight, before any work is done."""

    def __init__(self, app: ASGIApp, *, paths: frozenset[str], limit: int, metrics: RouterMetrics) -> None:
        self._app = app
        self._paths = paths
        self._limit = limit
        self._metrics = metrics
        self._num_in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
        elif self._num_in_flight >= self._limit:
            error = OverloadedError(f"{self._limit} requests are in flight already; retry later")
            self._metrics.count_request(error.http_status)
            await error_response(error)(scope, receive, send)
        else:
            await self._admit(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, has_begun = 500, False  # what a request ends with that ends without an answer

        async def send_and_note(message: Message) -> None:
            nonlocal status, has_begun
            if message["type"] == "http.response.start":
                status, has_begun = message["status"], True
            await send(message)

        self._num_in_flight += 1
        self._metrics.requests_running.inc()
        try:
            await self._app(scope, receive, send_and_note)
        except asyncio.CancelledError:  # by the server, which has drained for as long as it may
            error = UnavailableError("the router is shutting down; ask again, with the same seed for the same answer")
            note_outcome(scope, error.http_status)
            if has_begun:
                await send({"type": "http.response.body", "body": event(envelope(error)), "more_body": False})
            else:
                await error_response(error)(scope, receive, send)
        finally:
            self._num_in_flight -= 1
            self._metrics.requests_running.dec()
            self._metrics.count_request(scope.get("state", {}).get("outcome", status))
