"""The router as a program."""

from __future__ import annotations

import logging
import math
import signal
import socket
from types import FrameType

import uvicorn

from cluster.config import Config, RouterConfig
from cluster.errors import ConfigurationError
from services.garbage import keep_collections_short
from services.router.app import create_app

logger = logging.getLogger(__name__)


def run(config: Config) -> int:
    """Serves until SIGTERM or SIGINT, then lets running requests finish; returns the exit status.

    A second signal ends them at once.

    Raises ConfigurationError when the configuration cannot work.
    """
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    app = create_app(config)
    listener = _listen(config.router)
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
        )
    )

    def stop(_: int, __: FrameType | None) -> None:
        server.should_exit = True

    # While it runs the server has handlers of its own; after a clean shutdown it raises the signal again, and the
    # default handlers would end the process with an error.
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    host, port = listener.getsockname()[:2]
    logger.info("listening at http://%s:%d", f"[{host}]" if ":" in host else host, port)
    keep_collections_short()
    server.run(sockets=[listener])
    return 0 if server.started else 1


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:  # it is the second
            self.force_exit = True
            # What it leaves unfinished it would report as an error.
            logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        super().handle_exit(sig, frame)


def _listen(config: RouterConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen at {config.host}:{config.port}: {error.strerror}; set `router.port`"
        ) from error
    # Inherited by the connections: not every event loop sets it, and without it a chunk waits for 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
