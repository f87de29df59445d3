"""Middleware that assigns request IDs, and limits the requests in flight."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.config.router import RouterConfig
from cluster.errors import OutriderError, OverloadedError, UnavailableError
from services.router.anthropic_errors import is_anthropic
from services.router.errors import CLIENT_CLOSED_REQUEST, error_response
from services.router.http.body import BodyRoom, read_body
from services.router.http.current_key import current_key
from services.router.http.streaming import NotedSend, error_event, note_outcome
from services.router.metrics import RouterMetrics
from services.shared_limit import SharedLimit

_MAX_BODIES_BYTES = 512 * 2**20  # of all bodies in flight together, so that few clients cannot take all memory
_CLIENT_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class RequestIds:
    """Adds the header `x-request-id`, a random ID, to every answer. Answers of Anthropic's API also have `request-id`.

    A client cannot choose this ID. Its own one, from `x-client-request-id` or `x-request-id`, is only logged and sent
    back as `x-client-request-id`, if it is valid.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope)
        of_client = given.get("x-client-request-id") or given.get("x-request-id") or ""
        request_id = secrets.token_hex(16)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        if _CLIENT_REQUEST_ID.fullmatch(of_client):
            state["client_request_id"] = of_client
        names = ("x-request-id", "request-id") if is_anthropic(scope["path"]) else ("x-request-id",)

        def send_with_id(message: Message) -> Awaitable[None]:  # not async: saves a coroutine per chunk
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name in names:
                    headers[name] = request_id
                if "client_request_id" in state:
                    headers["x-client-request-id"] = state["client_request_id"]
            return send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(scope: Mapping[str, Any]) -> str:
    """Returns the ID of the request of `scope`."""
    request_id: str = scope["state"]["request_id"]
    return request_id


def route_of(scope: Mapping[str, Any]) -> str:
    """Returns the path of the route that answers the request, as declared; "" if there is none."""
    return str(scope.get("state", {}).get("route", ""))


class Admission:
    """Limits the requests to `routes` in flight to `max_waiting_requests`.

    A request counts once its body is complete. While the limit is reached, or the key's part of it, requests are
    refused both before and after their bodies are read.
    """

    def __init__(self, app: ASGIApp, *, routes: frozenset[str], config: RouterConfig, metrics: RouterMetrics) -> None:
        self._app = app
        self._routes = routes
        self._in_flight = SharedLimit(config.max_waiting_requests)
        self._max_body_bytes = config.max_body_bytes
        self._body_timeout_s = config.body_timeout_seconds
        self._room = BodyRoom(_MAX_BODIES_BYTES)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_of(scope) not in self._routes:
            await self._app(scope, receive, send)
            return
        with self._room.entered() as share:
            try:
                self._check_room()
                body = await read_body(scope, receive, self._max_body_bytes, self._body_timeout_s, share)
                self._check_room()
            except OutriderError as error:
                await self._refuse(error, scope, receive, send)
            except asyncio.CancelledError:
                await self._refuse(_shutting_down(), scope, receive, send)
            except ClientDisconnect:
                note_outcome(scope, CLIENT_CLOSED_REQUEST)
                self._metrics.count_request(CLIENT_CLOSED_REQUEST)
            else:
                await self._admit(_decompressed(scope), _replayed(body, receive), send)

    def _check_room(self) -> None:
        if not self._in_flight.has_room(current_key.get(), 1):
            self._metrics.count_rejection("max_num_queued_reqs")
            raise OverloadedError(
                f"{self._in_flight.held} requests are in flight already, of {self._in_flight.limit}; retry later"
            )

    async def _refuse(self, error: OutriderError, scope: Scope, receive: Receive, send: Send) -> None:
        self._metrics.count_request(error.http_status)
        await error_response(error)(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        noted = NotedSend(send)
        key = current_key.get()
        self._in_flight.take(key, 1)
        self._metrics.requests_running.inc()
        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            error = _shutting_down()
            note_outcome(scope, error.http_status)
            if noted.status is not None:
                await send({"type": "http.response.body", "body": error_event(scope, error), "more_body": False})
            else:
                await error_response(error)(scope, receive, send)
        finally:
            self._in_flight.give_back(key, 1)
            self._metrics.requests_running.dec()
            self._metrics.count_request(scope.get("state", {}).get("outcome", noted.status or 500))


def _shutting_down() -> UnavailableError:
    """Returns the error for requests that the server cancels after the drain time."""
    return UnavailableError("the router is shutting down; ask again, with the same seed for the same answer")


def _decompressed(scope: Scope) -> Scope:
    """Returns `scope` without the header `content-encoding`, since the body has been decompressed."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-encoding"]
    return scope if len(headers) == len(scope["headers"]) else {**scope, "headers": headers}


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that first returns all of `body`, then continues with `receive`."""
    is_read = False

    async def replay() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
