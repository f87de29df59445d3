"""One call of another program over HTTP, for commands: past any proxy, within a time, and with one kind of error."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any

from cluster.config_types import is_host_port
from cluster.errors import ConfigurationError

_MAX_ANSWER_BYTES = 65_536


def call(address: str, method: str, path: str, body: dict[str, Any] | None = None, *, seconds: float = 10.0) -> Any:
    """The JSON that `address` (host:port) answers; None where the answer is empty.

    Raises ConfigurationError when it does not answer in that time, or not with a 2xx and JSON.
    """
    if not is_host_port(address):
        raise ConfigurationError(f"{address!r} is no host:port")
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + seconds
    try:
        connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=seconds)
        try:
            headers = {"content-type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            content = bytearray()
            while chunk := answer.read1(4096):
                content += chunk
                if len(content) > _MAX_ANSWER_BYTES or time.monotonic() > deadline:
                    raise ConfigurationError(f"{address} answers too much, or too slowly")
        finally:
            connection.close()
        if not 200 <= answer.status < 300:
            raise ConfigurationError(f"{address} answers {answer.status}: {bytes(content[:300])!r}")
        return json.loads(content) if content else None
    except (OSError, OverflowError, ValueError, RecursionError, http.client.HTTPException) as error:
        reason = str(error) or type(error).__name__
        raise ConfigurationError(f"{address} does not answer as expected: {reason[:200]!r}") from error
