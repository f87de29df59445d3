"""Accepts HTTPS clients, and applies the connection limits and timeouts to their handshakes."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from services.router.http.connections import Connections
from services.router.http.protocol import BoundedHttpProtocol

_PAUSE_S = 0.1  # pause if no connection can be accepted because too many files are open


class TlsListener:
    """Replaces asyncio's TLS server, which cannot limit connections that have not completed their handshake.

    asyncio reports a connection only after its handshake, which may take a minute.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        connections: Connections,
        new_protocol: Callable[[str], BoundedHttpProtocol],
    ) -> None:
        """`new_protocol`: makes the protocol of a connection from a host; it is counted already."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._context = context
        self._connections = connections
        self._new_protocol = new_protocol
        self._handshakes: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        self._accepting = self._loop.create_task(self._accept())

    def close(self) -> None:
        self._accepting.cancel()
        for task in self._handshakes:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            try:
                client, address = await self._loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(_PAUSE_S)
                continue
            host = address[0]
            if self._connections.enter(host):
                task = self._loop.create_task(self._shake_hands(client, host))
                self._handshakes.add(task)
                task.add_done_callback(self._handshakes.discard)
            else:
                client.close()

    async def _shake_hands(self, client: socket.socket, host: str) -> None:
        protocol = self._new_protocol(host)
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                client,
                ssl=self._context,
                ssl_handshake_timeout=self._connections.config.header_timeout_seconds,
            )
        except OSError:
            self._connections.count_closed("handshake")
            protocol.leave()
            client.close()
        except asyncio.CancelledError:
            protocol.leave()
            client.close()
            raise
