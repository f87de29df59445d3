"""What the gRPC worker programs share: cores and threads, the server, its errors and its end."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.config import WorkerConfig
from cluster.engine.loader import Progress
from cluster.engine.memory_plan import num_speculative_blocks
from cluster.errors import ConfigurationError, OutriderError
from cluster.telemetry.metrics import Reading, WorkerMetrics, serve_metrics
from services.garbage import keep_collections_short

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_SECONDS = 0.0005
_SERVER_OPTIONS = (
    # Beyond 1,000 pending calls a server would cancel some at random; the router's queue limit is ours.
    ("grpc.server.max_pending_requests", 10_000),
    ("grpc.server.max_pending_requests_hard_limit", 20_000),
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.so_reuseport", 0),  # a port in use must be an error; else two servers would share its connections
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


def prepare_process(config: WorkerConfig) -> None:
    """Pins the process to its cores, sets its compute threads, and keeps threads from waiting for each other.

    The interpreter's default switch interval of 5 ms can outlast a whole round: the thread that takes a message
    from the network would wait that long for the engine's thread.
    """
    if config.cpus is not None:
        try:
            os.sched_setaffinity(0, config.cpus)
        except OSError as error:
            raise ConfigurationError(f"cannot pin to cpus {list(config.cpus)}: {error.strerror}") from error
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)


def loading_progress(model: str) -> Progress:
    """Logs how far `model` is loaded, at most once a second."""
    logged_at = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal logged_at
        if done == total or time.monotonic() > logged_at + 1.0:
            logged_at = time.monotonic()
            logger.info("loading %s: %d %%", model, done * 100 // total)

    return progress


def log_kv_cache(num_blocks: int, worker: WorkerConfig, num_slots: int) -> None:
    """Logs the size of the KV cache, and how much of it `num_slots` speculative slots for each sequence may take."""
    logger.info(
        "KV cache: %d blocks of %d tokens, %d of them for the %d speculative slots of each of %d sequences",
        num_blocks,
        worker.block_size,
        num_speculative_blocks(worker.max_num_seqs, num_slots, worker.block_size),
        num_slots,
        worker.max_num_seqs,
    )


def serve_readings(worker: WorkerConfig, read: Callable[[], Iterable[Reading]]) -> None:
    """Serves a metrics page with what `read` returns, if `worker` has a port for one."""
    if worker.metrics_port is not None:
        port = serve_metrics(WorkerMetrics(read).registry, worker.metrics_host, worker.metrics_port)
        logger.info("metrics page at %s, port %d", worker.metrics_host, port)


def new_epoch() -> int:
    """A number that differs after every restart."""
    return secrets.randbits(64)


@asynccontextmanager
async def errors_as_status(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Ends the call with the status of an OutriderError."""
    try:
        yield
    except OutriderError as error:
        await context.abort(error.grpc_code, error.message)


async def serve(
    address: str,
    service: str,
    add_servicer: Callable[[grpc.aio.Server], None],
    failure: Callable[[], BaseException | None],
    drain: Callable[[], None] = lambda: None,
) -> int:
    """Serves `service` at `address` until SIGTERM or SIGINT (returns 0) or until `failure()` (returns 1).

    Before it returns it calls `drain` and gives running calls a second to end.

    Raises ConfigurationError when the address cannot be listened at.
    """
    keep_collections_short()
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    add_servicer(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigurationError(f"cannot listen at {address}: is the port in use?") from error
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopping.set)
    await server.start()
    for name in ("", service):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    logger.info("serving %s at %s", service, address)
    while not stopping.is_set() and failure() is None:
        try:
            await asyncio.wait_for(stopping.wait(), timeout=0.2)
        except TimeoutError:
            continue
    await health_servicer.enter_graceful_shutdown()
    drain()
    await server.stop(grace=1.0)
    return 0 if failure() is None else 1
