"""Metrics pages of a cluster's programs, read as numbers."""

from __future__ import annotations

import http.client
import ssl
import time
from collections import defaultdict
from collections.abc import Iterable
from urllib.parse import SplitResult, urlsplit

from prometheus_client.parser import text_string_to_metric_families

from cluster.errors import ConfigurationError

_SECONDS = 10.0
_MAX_BYTES = 16 * 2**20

Sample = tuple[str, frozenset[tuple[str, str]]]
"""A metric's name and labels."""


class MetricsPage:
    """The numbers of one metrics page at one time."""

    def __init__(self, text: str) -> None:
        """Raises ValueError."""
        try:
            self._values: dict[Sample, float] = {
                (sample.name, frozenset(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
        except IndexError as error:  # a truncated line; all other errors are a ValueError
            raise ValueError("a line of it is invalid") from error

    def sum(self, name: str, **labels: str) -> float:
        """Sums all samples of `name` with these labels; 0 if there are none."""
        wanted = labels.items()
        return sum(value for (of, has), value in self._values.items() if of == name and wanted <= set(has))

    def by_label(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Returns the values of `name` with these labels, by the value of `label`."""
        found: defaultdict[str, float] = defaultdict(float)
        wanted = labels.items()
        for (of, has), value in self._values.items():
            if of == name and wanted <= set(has):
                found[dict(has).get(label, "")] += value
        return dict(found)


def total(pages: Iterable[MetricsPage], name: str, **labels: str) -> float:
    return sum(page.sum(name, **labels) for page in pages)


def read_page(
    url: str,
    context: ssl.SSLContext | None = None,
    *,
    server_name: str | None = None,
    token: str | None = None,
    without_token: str = "none is known",
) -> MetricsPage:
    """Reads the page at `url`, without proxy or redirects. Raises ConfigurationError.

    `context`: trusted certificates; None: those that this machine trusts. `server_name`: the name in the server's
    certificate; None: the host. The token is sent after the certificate is verified. `without_token`: the remedy for a
    page that requires another token.
    """
    try:
        connection = _connection(urlsplit(url), context, server_name)
        try:
            status, content = _get(connection, urlsplit(url).path, token)
        finally:
            connection.close()
        if status == 200:
            return MetricsPage(content.decode())
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConfigurationError(
            f"the metrics page {url!r} cannot be read ({error}): run this where it can be, or set metrics_host"
        ) from error
    if status != 401:
        raise ConfigurationError(f"the metrics page {url!r} answers {status}")
    asks = "requires a token" if token is None else "requires another token"
    raise ConfigurationError(f"the metrics page {url!r} {asks}: {without_token}")


def _get(connection: http.client.HTTPConnection, path: str, token: str | None) -> tuple[int, bytes]:
    deadline = time.monotonic() + _SECONDS
    connection.request("GET", path, headers={} if token is None else {"authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    content = bytearray()
    while answer.status == 200 and (chunk := answer.read1(65_536)):
        content += chunk
        if len(content) > _MAX_BYTES or time.monotonic() > deadline:
            raise ValueError("the answer is too long, or too slow")
    return answer.status, bytes(content)


def _connection(
    parts: SplitResult, context: ssl.SSLContext | None, server_name: str | None
) -> http.client.HTTPConnection:
    """Raises ValueError."""
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("the address is neither http:// nor https://")
    if parts.scheme == "http":
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=_SECONDS)
    return _Https(parts.hostname, parts.port, context or ssl.create_default_context(), server_name)


class _Https(http.client.HTTPSConnection):
    """Accepts a certificate for `server_name`, for any dialled host."""

    def __init__(self, host: str, port: int | None, context: ssl.SSLContext, server_name: str | None) -> None:
        super().__init__(host, port, timeout=_SECONDS, context=context)
        self._shown = context
        self._server_name = server_name or host

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._shown.wrap_socket(self.sock, server_hostname=self._server_name)
