"""HTTP errors: the classes that only HTTP needs, and the envelope of every error.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

The routes of Anthropic's API use that API's envelope (`anthropic_errors.py`).
Messages are bounded and quote at most an excerpt of what the user sent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ExceptionHandler, Receive, Scope, Send

from cluster.errors import InternalError, InvalidRequestError, NotFoundError, OutriderError
from services.router.anthropic_errors import anthropic_envelope, is_anthropic

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARACTERS = 500
_NAMED_FIELDS = 5  # maximum number of fields that a log line names
CLIENT_CLOSED_REQUEST = 499  # nginx's code; metrics and logs have it, but no client receives it

_noted: ContextVar[list[str] | None] = ContextVar("noted", default=None)

_excerpts = reprlib.Repr()
_excerpts.maxstring = _excerpts.maxlong = _excerpts.maxother = 60
_excerpts.maxlevel = _excerpts.maxlist = _excerpts.maxdict = 3


class PayloadTooLargeError(InvalidRequestError):
    http_status = 413


class RequestTimeoutError(InvalidRequestError):
    http_status = 408


class HeadersTooLargeError(InvalidRequestError):
    http_status = 431


class MethodNotAllowedError(InvalidRequestError):
    http_status = 405


class UnsupportedMediaTypeError(InvalidRequestError):
    http_status = 415


class InvalidApiKeyError(InvalidRequestError):
    http_status = 401
    code = "invalid_api_key"


class ForbiddenError(InvalidRequestError):
    http_status = 403


class RateLimitError(OutriderError):
    """A key exceeds its limit."""

    http_status = 429
    error_type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: int) -> None:
        """`retry_after`: seconds after which a retry may succeed."""
        super().__init__(message)
        self.retry_after = retry_after


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"


def excerpt(value: object) -> str:
    """Returns `value` as Python writes it, cut to a few dozen characters."""
    return _excerpts.repr(value)


def warn_of_unknown(names: Collection[str], what: str) -> None:
    """Logs one warning that names the ignored unknown fields, if there are any.

    `what` introduces the names, for example "fields of a request:".
    """
    warn_of(sorted(names), f"ignored the unknown {what}")


def warn_of(names: Sequence[str], what: str) -> None:
    """Logs one warning with `what` and the first of `names`, if there are any."""
    if names:
        named = ", ".join(excerpt(name) for name in names[:_NAMED_FIELDS])
        more = f" and {len(names) - _NAMED_FIELDS} more" if len(names) > _NAMED_FIELDS else ""
        logger.warning("%s %s%s", what, named, more)
        if (noted := _noted.get()) is not None:
            noted.append(f"{what} {named}{more}")


@contextlib.contextmanager
def noting_warnings() -> Iterator[list[str]]:
    """Yields a list to which the warnings of this context are added, for the client."""
    warnings: list[str] = []
    token = _noted.set(warnings)
    try:
        yield warnings
    finally:
        _noted.reset(token)


def warning_headers(warnings: Sequence[str]) -> dict[str, str]:
    """Returns the header `x-outrider-warning`, bounded and in ASCII; {} without warnings."""
    text = "; ".join(warnings).encode("ascii", "backslashreplace").decode()[:MAX_MESSAGE_CHARACTERS]
    return {"x-outrider-warning": text} if text else {}


def bounded_message(error: OutriderError) -> str:
    """Returns the message of `error`, cut to MAX_MESSAGE_CHARACTERS."""
    message = error.message
    return message if len(message) <= MAX_MESSAGE_CHARACTERS else message[: MAX_MESSAGE_CHARACTERS - 3] + "..."


def envelope_for(scope: Scope, error: OutriderError) -> dict[str, Any]:
    """Returns the error body for the request of `scope`, in the envelope of its API."""
    if is_anthropic(scope["path"]):
        return anthropic_envelope(error, bounded_message(error), scope.get("state", {}).get("request_id"))
    return envelope(error)


def envelope(error: OutriderError) -> dict[str, Any]:
    """Returns the error body for `error` in OpenAI's envelope."""
    return {
        "error": {
            "message": bounded_message(error),
            "type": error.error_type,
            "param": error.param,
            "code": getattr(error, "code", None),
        }
    }


def error_response(error: OutriderError, headers: Mapping[str, str] | None = None) -> Response:
    """Returns the answer to a request that ended with `error`."""
    headers = dict(headers or {})
    if error.retry_after is not None:
        headers.setdefault("retry-after", str(error.retry_after))
    return _ErrorResponse(error, headers)


class _ErrorResponse(Response):
    """An error response that chooses its envelope by the request's path when it is sent."""

    media_type = "application/json"

    def __init__(self, error: OutriderError, headers: Mapping[str, str]) -> None:
        super().__init__(json.dumps(envelope(error)), status_code=error.http_status, headers=headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note_error(scope, self._error)
        self.body = self.render(json.dumps(envelope_for(scope, self._error)))
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def note_error(scope: Scope, error: OutriderError) -> None:
    """Adds the type and param of `error` to this request's log line.

    The message is omitted because it may quote the client's text.
    """
    scope.setdefault("state", {})["error"] = {"error": error.error_type, "param": error.param}


def error_handlers() -> dict[Any, ExceptionHandler]:
    """Returns the handlers that answer every failure, including the framework's, in the envelope."""

    async def on_outrider_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, OutriderError)
        return error_response(error)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(_from_framework(request, error), error.headers)

    async def on_disconnect(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def on_bug(request: Request, _: Exception) -> Response:
        # This answer bypasses all middleware, so the request's ID is added here.
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
        return NotFoundError(f"there is no route {route}" + _hint(request.scope["path"]))
    if error.status_code == 405:
        return MethodNotAllowedError(f"there is no route {route}: the method is not allowed")
    return InternalError("internal error")


def _hint(path: str) -> str:
    """Returns the likely mistake in the client's base URL, or "" if `path` suggests none."""
    if path.startswith("/v1/v1"):
        return ": the client's base URL ends with /v1, and the client adds another"
    if path.startswith("//"):
        return ": the client's base URL ends with a slash, and the client adds another"
    return ""


def invalid_request(error: ValidationError) -> InvalidRequestError:
    """Converts the first complaint of `error`, naming its field."""
    complaint = error.errors(include_url=False)[0]
    location = complaint["loc"]
    param = str(location[0])
    if param == "stream_options" and len(location) > 1:
        param = f"stream_options.{location[1]}"
    if complaint["type"] == "missing":
        return InvalidRequestError(f"{param} is required", param=param)
    reason = complaint["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return InvalidRequestError(f"{param} {reason} (got {excerpt(complaint['input'])})", param=param)
