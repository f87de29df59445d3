"""Runs the router as a process: its listeners, servers and signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import time
from collections.abc import Iterator
from types import FrameType

from starlette.applications import Starlette

from cluster.config import Config
from cluster.config.router import RouterConfig
from cluster.config.types import is_loopback
from cluster.errors import cannot_listen
from cluster.interpreter import keep_collections_short, switch_threads_soon
from services.addresses import warn_of_unknown_hosts
from services.router.app import create_app
from services.router.http.certificate import HttpsCertificate
from services.router.http.connections import Connections, allow_open_files
from services.router.http.server import HttpServer
from services.router.operators.admin import create_admin_app
from services.router.operators.health import Health
from services.router.page.feed import Feed

logger = logging.getLogger(__name__)


def run(config: Config) -> int:
    """Serves until SIGTERM or SIGINT, then lets running requests finish. Returns the exit status.

    A second signal ends them at once. Raises ConfigurationError if the configuration cannot work.
    """
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    https = HttpsCertificate.of(config.router)
    listener = _listen(config.router.host, config.router.port, "router.port")
    app = create_app(config)
    warn_of_unknown_hosts(config.target.addresses, "target.addresses")
    admin = None
    if config.router.admin_listen is not None:
        admin_host, _, admin_port = config.router.admin_listen.rpartition(":")
        admin_listener = _listen(admin_host.strip("[]"), int(admin_port), "router.admin_listen")
        state = app.state
        admin_app = create_admin_app(
            state.switch, state.metrics, state.credentials, state.adapters, state.health, state.routing
        )
        admin = _AdminServer(admin_app, Connections(config.router, state.metrics), https, admin_listener)
    connections = Connections(config.router, app.state.metrics)
    server = _Server(app, connections, https, config.router, admin)
    allow_open_files(config.router.max_connections * (1 if admin is None else 2))

    def stop(_: int, __: FrameType | None) -> None:
        server.should_exit = True

    # uvicorn replaces these handlers while it runs. After a clean shutdown it restores them and raises the signal
    # again, and Python's default handlers would end the process with an error.
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    host, port = listener.getsockname()[:2]
    logger.info("listening on %s://%s:%d", config.router.scheme, f"[{host}]" if ":" in host else host, port)
    if admin is not None:
        logger.info("admin endpoints at %s, port %d", *admin.listener.getsockname()[:2])
    warn_of_open_doors(config)
    keep_collections_short()
    switch_threads_soon()
    server.run(sockets=[listener])
    return 0 if server.started else 1


def warn_of_open_doors(config: Config) -> None:
    """Logs a warning for addresses that more callers can use than their operator may expect."""
    router = config.router
    if "null" in router.cors_allow_origins:
        logger.warning("router.cors_allow_origins has null: sandboxed frames of any web site can call the router")
    if router.api_keys_file is not None:
        if router.admin_listen and router.admin_keys_file is None:
            logger.warning(
                "router.admin_keys_file is not set: each key of router.api_keys_file is an operator's at "
                "router.admin_listen %s. The next version will refuse clients' keys there: set "
                "router.admin_keys_file, which may be the same file",
                router.admin_listen,
            )
        return
    if not is_loopback(router.host):
        logger.warning(
            "listening on %s without keys: everyone who reaches it can use it; set router.api_keys_file, or keep it "
            "behind a proxy that requires keys",
            router.host,
        )
    if (
        router.admin_listen
        and router.admin_keys_file is None
        and not is_loopback(router.admin_listen.rpartition(":")[0])
    ):
        logger.warning(
            "router.admin_listen %s has no keys: everyone who reaches it can switch speculation and routing, and load "
            "adapters; "
            "set router.admin_keys_file",
            router.admin_listen,
        )


class _AdminServer(HttpServer):
    """Serves the admin endpoints in the event loop of the router's own server."""

    def __init__(
        self, app: Starlette, connections: Connections, https: HttpsCertificate | None, listener: socket.socket
    ) -> None:
        # Shutdown waits 1 s at most: a caller may have sent half a request.
        super().__init__(app, connections, https, lifespan="off", timeout_graceful_shutdown=1)
        self.listener = listener

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # the other server handles signals
        yield

    async def run_beside(self) -> None:
        await self.serve(sockets=[self.listener])


class _Server(HttpServer):
    def __init__(
        self,
        app: Starlette,
        connections: Connections,
        https: HttpsCertificate | None,
        config: RouterConfig,
        admin: _AdminServer | None,
    ) -> None:
        super().__init__(
            app,
            connections,
            https,
            loop="uvloop",
            lifespan="on",
            timeout_graceful_shutdown=math.ceil(config.drain_seconds - config.drain_notice_seconds),
        )
        self._admin = admin
        self._feed: Feed = app.state.feed
        self._health: Health = app.state.health
        self._notice_seconds = config.drain_notice_seconds
        self._closes_at = math.inf  # on the clock of time.monotonic
        self._following: asyncio.Task[None] | None = None
        self._admin_task: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._https is not None:
            self._following = asyncio.create_task(self._https.follow())
        if self._admin is not None:
            self._admin_task = asyncio.create_task(self._admin.run_beside())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._feed.close()  # the page's viewers have no request to wait for
        await super().shutdown(sockets)  # waits for requests, which an operator may want to observe
        if self._following is not None:
            self._following.cancel()
        if self._admin is not None and self._admin_task is not None:
            self._admin.should_exit = True
            await self._admin_task

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or time.monotonic() >= self._closes_at

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._notice_seconds and not self._health.is_draining:
            self._health.is_draining = True
            self._closes_at = time.monotonic() + self._notice_seconds
            return
        if self.should_exit or self._health.is_draining:  # the second signal
            self.force_exit = True
            if self._admin is not None:
                self._admin.should_exit = self._admin.force_exit = True
            # uvicorn would report the unfinished requests as an error.
            logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        super().handle_exit(sig, frame)


def _listen(host: str, port: int, setting: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:  # OverflowError: a port above 65535
        raise cannot_listen(f"{host}:{port}", error, f"set `{setting}`") from error
    # Connections inherit this option. Not every event loop sets it, and without it a chunk is delayed by 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
