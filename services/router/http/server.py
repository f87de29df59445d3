"""The HTTP server of a router: uvicorn with limits for its connections."""

from __future__ import annotations

import functools
import socket
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from services.router.http.certificate import HttpsCertificate
from services.router.http.connections import Connections
from services.router.http.protocol import BoundedHttpProtocol
from services.router.http.tls_listener import TlsListener

_SEND_BUFFER_BYTES = 262_144


class HttpServer(uvicorn.Server):
    """uvicorn server whose connections are counted and limited by `connections`.

    `more`: additional settings of uvicorn.
    """

    def __init__(
        self, app: ASGIApp, connections: Connections, https: HttpsCertificate | None = None, **more: Any
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(Any, functools.partial(BoundedHttpProtocol, connections)),
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                forwarded_allow_ips=[str(network) for network in connections.config.trusted_proxies],
                timeout_keep_alive=cast(int, connections.config.idle_timeout_seconds),  # may be a fraction
                **more,
            )
        )
        self._connections = connections
        self._https = https

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in sockets or []:
            # Connections inherit the size. Otherwise the kernel buffers megabytes of an answer before the router can
            # notice a slow client.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        if self._https is None:
            await super().startup(sockets)
            return
        await super().startup([])
        for listener in sockets or []:
            server: Any = TlsListener(listener, self._https.context, self._connections, self._new_protocol)
            self.servers.append(server)

    def _new_protocol(self, host: str) -> BoundedHttpProtocol:
        return BoundedHttpProtocol(
            self._connections,
            counted_as=host,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
