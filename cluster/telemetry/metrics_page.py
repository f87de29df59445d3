"""The page of a worker's metrics: HTTP, or HTTPS with client certificates; optionally a token."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from cluster.errors import cannot_listen
from cluster.transport.listening import Listener
from cluster.transport.token_file import TokenFile

audit = logging.getLogger("outrider.audit")

_MAX_CONNECTIONS = 16  # each has a thread, and a page has a few scrapers; further connections are closed
_CONNECTION_SECONDS = 10.0  # from accepting a connection to its last byte: Prometheus's default `scrape_timeout`
_BEARER = "bearer "


@dataclass(frozen=True, slots=True)
class PageGuard:
    """Access to a page. `context`: returns the TLS context of connections; None: plaintext.

    `accepts`: returns True if a caller with the given token may read the page; None: all callers may.
    """

    context: Callable[[], ssl.SSLContext] | None = None
    accepts: Callable[[bytes], bool] | None = None

    @classmethod
    def of(cls, listener: Listener, metrics_token_file: str | None) -> PageGuard:
        """Returns a guard that admits the tokens of `listener` and of the file `metrics_token_file`.

        Raises ConfigurationError if the file cannot be read.
        """
        token = None if metrics_token_file is None else TokenFile(metrics_token_file, "metrics_token_file")
        if token is None and not listener.asks_for_token:
            return cls(listener.page_context())
        return cls(
            listener.page_context(),
            lambda given: listener.accepts(given) or (token is not None and token.accepts(given)),
        )

    def is_open_to(self, authorization: str) -> bool:
        if self.accepts is None:
            return True
        is_bearer = authorization[: len(_BEARER)].lower() == _BEARER
        # WSGI's strings are bytes that were read as Latin-1.
        return is_bearer and self.accepts(authorization[len(_BEARER) :].strip().encode("latin-1"))


def serve_metrics(registry: CollectorRegistry, host: str, port: int, guard: PageGuard | None = None) -> int:
    """Serves `registry` at `/metrics` from a daemon thread. Returns the port; with `port` 0, chooses a free one."""
    guard = guard or PageGuard()
    app = make_wsgi_app(registry)

    def guarded(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if not guard.is_open_to(environ.get("HTTP_AUTHORIZATION", "")):
            audit.warning("audit: refused 401: metrics page, from %s", environ.get("REMOTE_ADDR", "unknown"))
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
            return [b"send the token of this page's metrics_token_file as `Authorization: Bearer TOKEN`\n"]
        # Prometheus prefers OpenMetrics, in which the client library replaces the colon of vLLM's names.
        answer: Iterable[bytes] = app(environ | {"HTTP_ACCEPT": "text/plain"}, start_response)
        return answer

    try:
        server = make_server(host, port, guarded, _server_class(host, port, guard.context), _SilentHandler)
    except OSError as error:
        raise cannot_listen(f"{host}:{port}", error, "set another `metrics_port` or `metrics_host`") from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server.server_port


def _server_class(host: str, port: int, context: Callable[[], ssl.SSLContext] | None) -> type[WSGIServer]:
    (family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)

    slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    class Server(ThreadingMixIn, WSGIServer):
        address_family = family
        daemon_threads = True

        def verify_request(self, request: Any, client_address: Any) -> bool:
            return slots.acquire(blocking=False)

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                # The duplicate stays valid when the TLS handshake takes over the socket.
                with request.dup() as connection:
                    timer = threading.Timer(_CONNECTION_SECONDS, connection.shutdown, [socket.SHUT_RDWR])
                    timer.daemon = True
                    timer.start()
                    super().process_request_thread(request, client_address)
                    timer.cancel()
            finally:
                slots.release()

        def finish_request(self, request: Any, client_address: Any) -> None:
            """Does the TLS handshake in the connection's own thread, so that a slow caller does not block others."""
            if context is None:
                super().finish_request(request, client_address)
                return
            try:
                connection = context().wrap_socket(request, server_side=True)
            except OSError as error:  # no TLS, no certificate, or one of another CA
                audit.warning("audit: refused: metrics page, from %s: TLS fails: %.200s", client_address[0], error)
                return
            with connection:
                super().finish_request(connection, client_address)

    return Server


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Discards the line that the base class would print for each request."""
