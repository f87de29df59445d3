"""Reads a streamed answer of a router, event by event, for commands."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from cluster.errors import ConfigurationError
from services.http_call import API_KEY
from services.terminal import as_line

_SECONDS = 300.0  # time without a byte
_MAX_ERROR_BYTES = 65_536
_DATA = b"data: "


def stream_events(
    url: str, path: str, body: dict[str, Any], context: ssl.SSLContext | None = None
) -> Iterator[dict[str, Any]]:
    """Yields the events of the answer to `body`, posted to `path` of the router at `url`.

    Sends the key in the environment. Closing the iterator ends the request. Raises ConfigurationError if there is no
    such answer, or it ends with an error.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(f"{url!r} is not http://host:port: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigurationError(f"{url!r} is not http://host:port")
    headers = {"content-type": "application/json"}
    if key := os.environ.get(API_KEY):
        headers["authorization"] = f"Bearer {key}"
    connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(
            host, port, timeout=_SECONDS, context=context or ssl.create_default_context()
        )
    try:
        connection.request("POST", path, json.dumps(body | {"stream": True}), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise ConfigurationError(_explain(url, answer.status, answer.read(_MAX_ERROR_BYTES)))
        for line in answer:
            if line.startswith(_DATA) and line.strip() != b"data: [DONE]":
                event = json.loads(line.removeprefix(_DATA))
                if not isinstance(event, dict):
                    raise ValueError("an event is not a JSON object")
                if "error" in event:
                    reason = event["error"]
                    message = as_line(str(reason.get("message") if isinstance(reason, dict) else reason))
                    raise ConfigurationError(f"{url}: the answer ends with an error: {message}")
                yield event
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConfigurationError(f"{url} does not answer as expected: {error or type(error).__name__}") from error
    finally:
        connection.close()


def _explain(url: str, status: int, content: bytes) -> str:
    if status == 401:
        return f"{url} requires a key: set {API_KEY} in the environment to one of its keys"
    try:
        message = json.loads(content)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = repr(content[:300])
    return f"{url} answers {status}: {as_line(str(message))}"
