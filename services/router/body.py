"""From the bytes of an HTTP body to a JSON object, within limits that hold while reading."""

from __future__ import annotations

from typing import Any

import pydantic_core
from starlette.requests import Request

from cluster.errors import InvalidRequestError
from services.router.errors import PayloadTooLargeError, UnsupportedMediaTypeError


async def read_json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object in the body of `request`.

    NaN, Infinity, invalid UTF-8, lone surrogates and anything nested too deep are not JSON here.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaTypeError("send the body as Content-Type: application/json")
    body = await _read(request, max_bytes)
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return value


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = PayloadTooLargeError(f"the body is over the limit of {max_bytes} bytes")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)
