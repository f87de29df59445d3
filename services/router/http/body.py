"""Reads an HTTP body as a JSON object, and enforces its limits while reading."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope

from cluster.errors import InvalidRequestError, OverloadedError
from services.router.errors import PayloadTooLargeError, RequestTimeoutError, UnsupportedMediaTypeError
from services.router.http.content_encoding import coding_of, decode
from services.router.http.current_key import current_key
from services.router.http.json_values import parse_json
from services.shared_limit import SharedLimit

_MAX_ADMIN_BYTES = 65_536  # size of an operator's call
_ADMIN_TIMEOUT_S = 10.0
_FREE_BYTES = 65_536  # bytes of each body that are not counted; the number of connections bounds their sum


class BodyRoom:
    """Limits the total bytes of all bodies in flight.

    The first _FREE_BYTES of each body are not counted.
    """

    def __init__(self, max_bytes: int) -> None:
        self._bytes = SharedLimit(max_bytes)

    @contextlib.contextmanager
    def entered(self) -> Iterator[BodyShare]:
        """Yields a request's share, which is returned when the context ends."""
        share = BodyShare(self)
        try:
            yield share
        finally:
            self._bytes.give_back(current_key.get(), share.num_bytes)

    def take(self, num_bytes: int) -> None:
        """Counts `num_bytes` more. Raises OverloadedError if there is no room for them."""
        key = current_key.get()
        if not self._bytes.has_room(key, num_bytes):
            raise OverloadedError(
                f"bodies of requests in flight take {self._bytes.held} of {self._bytes.limit} bytes; retry later"
            )
        self._bytes.take(key, num_bytes)


class BodyShare:
    """The bytes of a `BodyRoom` that one body holds."""

    def __init__(self, room: BodyRoom) -> None:
        self.num_bytes = 0
        self._room = room

    def grow_to(self, length: int) -> None:
        """Takes room for a body of `length` bytes. Raises OverloadedError if there is none."""
        more = length - _FREE_BYTES - self.num_bytes
        if more > 0:
            self._room.take(more)
            self.num_bytes += more


async def read_body(
    scope: Scope, receive: Receive, max_bytes: int, timeout_s: float | None = None, share: BodyShare | None = None
) -> bytes:
    """Returns a request's body, decompressed.

    `max_bytes` limits both the compressed and the decompressed size. `share` counts its bytes against the total of all
    requests.
    Raises PayloadTooLargeError, UnsupportedMediaTypeError for an unknown compression, InvalidRequestError if it cannot
    be decompressed, RequestTimeoutError after `timeout_s` seconds, OverloadedError if there is no room for it, or
    ClientDisconnect.
    """
    headers = Headers(scope=scope)
    coding = coding_of(",".join(headers.getlist("content-encoding")))
    body = await _read(receive, headers, max_bytes, timeout_s, share)
    if coding is not None:
        body = await decode(body, coding, max_bytes)
        if share is not None:
            share.grow_to(len(body))
    return body


async def _read(
    receive: Receive, headers: Headers, max_bytes: int, timeout_s: float | None, share: BodyShare | None
) -> bytes:
    too_large = PayloadTooLargeError(f"the body is over the limit of {max_bytes} bytes")
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunk = message.get("body", b"")
                if len(body) + len(chunk) > max_bytes:
                    raise too_large
                if share is not None:
                    share.grow_to(len(body) + len(chunk))
                if not message.get("more_body", False):
                    return bytes(body + chunk) if body else chunk
                body += chunk
    except TimeoutError as error:
        raise RequestTimeoutError(f"the body did not arrive within {timeout_s:g} s") from error


async def read_json_body(request: Request, max_bytes: int, timeout_s: float | None = None) -> bytes:
    """Returns the body of `request`. Raises UnsupportedMediaTypeError if it is not declared as JSON.

    `timeout_s`: limit in seconds for the body to arrive; None: no limit, as when middleware has read it already.
    Raises the errors of `read_body`, too.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaTypeError("send the body as Content-Type: application/json")
    return await read_body(request.scope, request.receive, max_bytes, timeout_s)


def to_json_object(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in `body`. Raises InvalidRequestError if it is anything else."""
    try:
        value = parse_json(body)
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return value


async def read_admin_call(request: Request) -> dict[str, Any]:
    """Returns the JSON object in the body of an operator's `request`. Raises OutriderError."""
    return to_json_object(await read_json_body(request, _MAX_ADMIN_BYTES, _ADMIN_TIMEOUT_S))
