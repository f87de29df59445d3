"""One HTTP call of another program, for commands: without proxy, with a timeout, and with one kind of error."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import ssl
import time
from pathlib import Path
from typing import Any

from cluster.config.types import is_host_port
from cluster.errors import ConfigurationError

API_KEY = "OUTRIDER_API_KEY"  # an environment variable, which process lists do not show
# Hash of the launcher's own key, in the environment of its router, which only the same user can read.
LAUNCHER_KEY_SHA256 = "OUTRIDER_LAUNCHER_KEY_SHA256"
_MAX_ANSWER_BYTES = 65_536
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


def call(
    address: str,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    seconds: float = 10.0,
    context: ssl.SSLContext | None = None,
    max_bytes: int = _MAX_ANSWER_BYTES,
    accepted_error: int | None = None,
) -> Any:
    """Returns the JSON that `address` (host:port, http://host:port or https://host:port) answers; None if it is empty.

    Sends the key in the environment, if there is one. `context`: trusted certificates; None: those that this machine
    trusts. `accepted_error`: another status whose answer is returned. Raises ConfigurationError if there is no 2xx
    answer with JSON in that time, or it has more than `max_bytes`.
    """
    scheme, has_scheme, place = address.rpartition("://")
    if not is_host_port(place.rstrip("/")) or (has_scheme and scheme not in ("http", "https")):
        raise ConfigurationError(f"{address!r} is not host:port")
    host, _, port = place.rstrip("/").rpartition(":")
    headers = {"content-type": "application/json"}
    if key := os.environ.get(API_KEY):
        headers["authorization"] = f"Bearer {key}"
    deadline = time.monotonic() + seconds
    try:
        connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=seconds)
        if scheme == "https":
            connection = http.client.HTTPSConnection(
                host.strip("[]"), int(port), timeout=seconds, context=context or ssl.create_default_context()
            )
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            content = bytearray()
            while chunk := answer.read1(4096):
                content += chunk
                if len(content) > max_bytes or time.monotonic() > deadline:
                    raise ConfigurationError(f"{address}: the answer is too long, or too slow")
        finally:
            connection.close()
        if answer.status == 401:
            raise ConfigurationError(f"{address} requires a key: set {API_KEY} in the environment to one of its keys")
        if not 200 <= answer.status < 300 and answer.status != accepted_error:
            raise ConfigurationError(f"{address} answers {answer.status}: {bytes(content[:300])!r}")
        return json.loads(content) if content else None
    except (OSError, OverflowError, ValueError, RecursionError, http.client.HTTPException) as error:
        reason = str(error) or type(error).__name__
        raise ConfigurationError(f"{address} does not answer as expected: {reason[:200]!r}") from error


def router_url(text: str) -> str:
    """Parses a URL for argparse: an address without a scheme is http."""
    return (text if "://" in text else f"http://{text}").rstrip("/")


def add_url_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        type=router_url,
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="address of the router; default %(default)s",
    )


def add_trust_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options for trusted certificates of a router: see `trusted_context`."""
    trust = parser.add_mutually_exclusive_group()
    trust.add_argument(
        "--ca-file",
        metavar="FILE",
        help="authority that signs the router's certificate (default: the authorities that this machine trusts)",
    )
    trust.add_argument("--certificate", metavar="FILE", help="the router's own certificate, for any name")


def trusted_context(arguments: argparse.Namespace) -> ssl.SSLContext | None:
    """Returns the context for the options. Raises ConfigurationError if a file cannot be used."""
    try:
        if arguments.ca_file is not None:
            return ssl.create_default_context(cafile=arguments.ca_file)
        return pinned_context(arguments.certificate)
    except (OSError, ValueError) as error:
        file = arguments.ca_file or arguments.certificate
        raise ConfigurationError(f"{file} cannot be used as a certificate: {error}") from error


def pinned_context(certificate_file: str | None) -> ssl.SSLContext | None:
    """Returns a context that trusts exactly this certificate, under any name; None for a router without TLS.

    For a launcher that calls its own router. Raises OSError if the file cannot be read.
    """
    if certificate_file is None:
        return None
    own = _PEM.search(Path(certificate_file).read_text(encoding="ascii"))
    if own is None:
        raise OSError(f"{certificate_file} has no certificate")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the authority need not be self-signed
    context.load_verify_locations(cadata=own[0])
    return context
