"""The router as a program."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
from collections.abc import Iterator
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from cluster.config import Config
from cluster.errors import ConfigurationError
from services.garbage import keep_collections_short
from services.router.admin import create_admin_app
from services.router.app import create_app

logger = logging.getLogger(__name__)


def run(config: Config) -> int:
    """Serves until SIGTERM or SIGINT, then lets running requests finish; returns the exit status.

    A second signal ends them at once.

    Raises ConfigurationError when the configuration cannot work.
    """
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    app = create_app(config)
    listener = _listen(config.router.host, config.router.port, "router.port")
    admin = None
    if config.router.admin_listen is not None:
        admin_host, _, admin_port = config.router.admin_listen.rpartition(":")
        admin_listener = _listen(admin_host.strip("[]"), int(admin_port), "router.admin_listen")
        admin = _AdminServer(create_admin_app(app.state.switch), admin_listener)
    server = _Server(
        uvicorn.Config(
            app,
            loop="uvloop",
            http="httptools",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(config.router.drain_seconds),
        ),
        admin,
    )

    def stop(_: int, __: FrameType | None) -> None:
        server.should_exit = True

    # While it runs the server has handlers of its own; after a clean shutdown it raises the signal again, and the
    # default handlers would end the process with an error.
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    host, port = listener.getsockname()[:2]
    logger.info("listening at http://%s:%d", f"[{host}]" if ":" in host else host, port)
    if admin is not None:
        logger.info("operators are answered at %s, port %d", *admin.listener.getsockname()[:2])
    keep_collections_short()
    server.run(sockets=[listener])
    return 0 if server.started else 1


class _AdminServer(uvicorn.Server):
    """Runs in the event loop of the router's own server, beside it, until told to stop."""

    def __init__(self, app: Starlette, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=1,  # a caller who sends half a request is not waited for
            )
        )
        self.listener = listener

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # they are the other server's
        yield

    async def run_beside(self) -> None:
        await self.serve(sockets=[self.listener])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, admin: _AdminServer | None) -> None:
        super().__init__(config)
        self._admin = admin
        self._admin_task: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._admin is not None:
            self._admin_task = asyncio.create_task(self._admin.run_beside())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)  # waits for requests: an operator may want to know of them
        if self._admin is not None and self._admin_task is not None:
            self._admin.should_exit = True
            await self._admin_task

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:  # it is the second
            self.force_exit = True
            if self._admin is not None:
                self._admin.should_exit = self._admin.force_exit = True
            # What it leaves unfinished it would report as an error.
            logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        super().handle_exit(sig, frame)


def _listen(host: str, port: int, setting: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:  # the latter of a port beyond 65535
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"cannot listen at {host}:{port}: {reason}; set `{setting}`") from error
    # Inherited by the connections: not every event loop sets it, and without it a chunk waits for 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
