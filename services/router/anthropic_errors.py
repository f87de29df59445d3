"""The error envelope of Anthropic's API, and the routes that use it.

{"type": "error", "error": {"type": ..., "message": ...}, "request_id": ...}
"""

from __future__ import annotations

from typing import Any

from cluster.errors import OutriderError, OverloadedError

MESSAGES_PATH = "/v1/messages"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def is_anthropic(path: str) -> bool:
    """Returns whether `path` belongs to Anthropic's API."""
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def anthropic_envelope(error: OutriderError, message: str, request_id: str | None = None) -> dict[str, Any]:
    """Returns the error body for `error`, with the text `message`.

    If `request_id` is None, the body has no such field.
    """
    envelope = {"type": "error", "error": {"type": _type_of(error), "message": message}}
    return envelope if request_id is None else envelope | {"request_id": request_id}


def _type_of(error: OutriderError) -> str:
    if isinstance(error, OverloadedError):
        return "overloaded_error"
    if error.http_status >= 500:
        return "api_error"
    return _TYPES.get(error.http_status, "invalid_request_error")
