"""The HTTP face of errors: the kinds only HTTP has, and the envelope every failure is answered in.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Messages are bounded and quote at most an excerpt of what the user sent.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from cluster.errors import InternalError, InvalidRequestError, NotFoundError, OutriderError

MAX_MESSAGE_CHARACTERS = 500
CLIENT_CLOSED_REQUEST = 499  # nginx's code; nobody receives it, but it is counted

_excerpts = reprlib.Repr()
_excerpts.maxstring = _excerpts.maxlong = _excerpts.maxother = 60
_excerpts.maxlevel = _excerpts.maxlist = _excerpts.maxdict = 3


class PayloadTooLargeError(InvalidRequestError):
    http_status = 413


class MethodNotAllowedError(InvalidRequestError):
    http_status = 405


class UnsupportedMediaTypeError(InvalidRequestError):
    http_status = 415


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"


class ContextLengthError(InvalidRequestError):
    code = "context_length_exceeded"


def excerpt(value: object) -> str:
    """`value` as Python writes it, cut to a few dozen characters."""
    return _excerpts.repr(value)


def envelope(error: OutriderError) -> dict[str, Any]:
    """The body that `error` is answered with."""
    message = error.message
    if len(message) > MAX_MESSAGE_CHARACTERS:
        message = message[: MAX_MESSAGE_CHARACTERS - 3] + "..."
    return {
        "error": {
            "message": message,
            "type": error.error_type,
            "param": error.param,
            "code": getattr(error, "code", None),
        }
    }


def error_response(error: OutriderError, headers: Mapping[str, str] | None = None) -> Response:
    """The answer to a request that ended with `error`."""
    headers = dict(headers or {})
    if error.http_status == 503:
        headers.setdefault("retry-after", "1")
    return Response(
        json.dumps(envelope(error)),
        status_code=error.http_status,
        headers=headers,
        media_type="application/json",
    )


def error_handlers() -> dict[Any, ExceptionHandler]:
    """The handlers that answer every failure, the framework's too, in the envelope."""

    async def on_outrider_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, OutriderError)
        return error_response(error)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(_from_framework(request, error), error.headers)

    async def on_disconnect(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def on_bug(request: Request, _: Exception) -> Response:
        # Answered outside all middleware, so the request's ID is added here.
        headers = {"x-request-id": getattr(request.state, "request_id", "")}
        return error_response(InternalError("internal error"), headers)

    return {
        OutriderError: on_outrider_error,
        HTTPException: on_http_exception,
        ClientDisconnect: on_disconnect,
        Exception: on_bug,
    }


def _from_framework(request: Request, error: HTTPException) -> OutriderError:
    route = f"{request.method} {excerpt(request.url.path)}"
    if error.status_code == 404:
        return NotFoundError(f"there is no route {route}")
    if error.status_code == 405:
        return MethodNotAllowedError(f"there is no route {route}: the method is not allowed")
    return InternalError("internal error")
