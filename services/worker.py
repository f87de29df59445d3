"""Common parts of the gRPC worker programs: cores and threads, the server, its errors and its shutdown."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol

import grpc
import torch
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cluster.config import Config
from cluster.config.types import is_loopback
from cluster.config.workers import WorkerConfig
from cluster.engine.cpu_kernels import best_instruction_set, has_kernels, instruction_set
from cluster.engine.loader import Progress
from cluster.engine.memory_plan import num_speculative_blocks
from cluster.errors import AddressInUseError, ConfigurationError, OutriderError, first_line
from cluster.interpreter import keep_collections_short, switch_threads_soon
from cluster.telemetry.metrics import Reading, WorkerMetrics
from cluster.telemetry.metrics_page import PageGuard, serve_metrics
from cluster.transport.listening import Listener
from protos.speculation.v1 import types_pb2
from services.addresses import check_worker, warn_of_unknown_hosts

logger = logging.getLogger(__name__)

SERVER_OPTIONS = (
    # Beyond 1,000 pending calls a server would cancel some at random; the router's queue limit applies.
    ("grpc.server.max_pending_requests", 10_000),
    ("grpc.server.max_pending_requests_hard_limit", 20_000),
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.max_concurrent_streams", 256),  # streams per connection; its peer holds further calls back
    ("grpc.so_reuseport", 0),  # a port in use must be an error; otherwise two servers would share its connections
    # A peer that has vanished, with its host or behind a broken network, is noticed in four seconds, and its sequences
    # are freed. The ping's own timeout decides this; its default is a minute.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Peers ping at this rate; without this option a quiet connection would be ended (GOAWAY, "too many pings").
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)
_WATCH_SECONDS = 0.2
_LAST_WORDS_SECONDS = 1.0  # time for streams to write their last messages


def prepare_process(config: WorkerConfig) -> None:
    """Pins the process to its cores, sets its compute threads, and shortens the thread switch interval."""
    if config.cpus is not None:
        try:
            os.sched_setaffinity(0, config.cpus)
        except OSError as error:
            raise ConfigurationError(f"cannot pin to cpus {list(config.cpus)}: {error.strerror}") from error
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    switch_threads_soon()


def check_before_loading(config: Config, pool: str) -> None:
    """Runs the checks that need no model, as loading it may take minutes. Raises ConfigurationError."""
    Listener.of(config.tls, pool)
    check_worker(config.target if pool == "target" else config.draft, pool)
    if pool == "target":
        warn_of_unknown_hosts(config.draft.addresses, "draft.addresses")


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Raises ConfigurationError, with one line, for what prevents the model from being loaded on this machine."""
    try:
        yield
    except OutriderError:
        raise
    except Exception as error:  # libraries raise errors of their own for damaged files and for want of memory
        logger.debug("cannot load %s", model, exc_info=True)
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            remedy = "set kv_cache_bytes or max_model_len to less, or use a smaller model"
            raise ConfigurationError(f"not enough memory for {model!r} and its KV cache: {remedy}") from error
        raise ConfigurationError(f"cannot load {model!r}: {type(error).__name__}: {first_line(error)}") from error


def loading_progress(model: str) -> Progress:
    """Returns a function that logs the progress of loading `model`, at most once a second."""
    logged_at = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal logged_at
        if done == total or time.monotonic() > logged_at + 1.0:
            logged_at = time.monotonic()
            logger.info("loading %s: %d %%", model, done * 100 // total)

    return progress


def log_kv_cache(num_blocks: int, block_size: int, max_num_seqs: int, num_slots: int) -> None:
    """Logs the size of the KV cache, and the share that `num_slots` speculative slots per sequence may take."""
    logger.info(
        "KV cache: %d blocks of %d tokens, %d of them for the %d speculative slots of each of %d sequences",
        num_blocks,
        block_size,
        num_speculative_blocks(max_num_seqs, num_slots, block_size),
        num_slots,
        max_num_seqs,
    )


def serve_readings(
    worker: WorkerConfig,
    read: Callable[[], Iterable[Reading]],
    model_name: str,
    listener: Listener | None = None,
) -> str:
    """Serves a metrics page with the readings of `read` to callers that `listener` accepts, if `worker` has a port.

    `model_name`: the clients' name of the model, a label of the metrics that have vLLM's names. Returns the page's URL,
    or "" without one.
    """
    if worker.metrics_port is None:
        return ""
    guard = PageGuard.of(listener or Listener(), worker.metrics_token_file)
    port = serve_metrics(WorkerMetrics(read, model_name).registry, worker.metrics_host, worker.metrics_port, guard)
    scheme = "https" if listener is not None and listener.is_secure else "http"
    host = f"[{worker.metrics_host}]" if ":" in worker.metrics_host else worker.metrics_host
    url = f"{scheme}://{host}:{port}/metrics"
    logger.info("metrics page at %s", url)
    return url


def describe_machine(metrics_url: str = "") -> types_pb2.Machine:
    """Returns the current description of this process's machine."""
    instructions = (instruction_set(torch.bfloat16), best_instruction_set()) if has_kernels() else ()
    own, best = (choice.name.lower() for choice in instructions) if instructions else ("", "")
    return types_pb2.Machine(
        version=importlib.metadata.version("outrider"),
        host=socket.gethostname(),
        cpus=sorted(os.sched_getaffinity(0)),
        num_threads=torch.get_num_threads(),
        instruction_set=own,
        best_instruction_set=best,
        unix_seconds=time.time(),
        metrics_url=metrics_url,
    )


def new_epoch() -> int:
    """Returns a number that differs after every restart."""
    return secrets.randbits(64)


@asynccontextmanager
async def errors_as_status(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Ends the call with the status of an OutriderError; a message that cannot be parsed is INVALID_ARGUMENT."""
    try:
        yield
    except DecodeError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except OutriderError as error:
        await context.abort(error.grpc_code, error.message)


class Worker(Protocol):
    """The lifecycle of the service that a program runs."""

    @property
    def error(self) -> BaseException | None:
        """The error that ended the service's loop, if any."""

    @property
    def is_stuck(self) -> bool:
        """True if the loop has work and makes no step."""

    async def drain(self, seconds: float) -> None:
        """Accepts no new work. Returns after the running work has ended or been given up, within `seconds`."""


async def serve(
    config: WorkerConfig,
    listener: Listener,
    service: str,
    add_servicer: Callable[[grpc.aio.Server], None],
    worker: Worker,
) -> int:
    """Serves `service` with `config` until SIGTERM or SIGINT (returns 0) or until `worker` fails (returns 1).

    Then drains for at most `drain_seconds` of `config`; a second signal ends that at once. Raises ConfigurationError if
    the program cannot listen at an address.
    """
    keep_collections_short()
    address = config.listen_address
    server = listener.new_server(SERVER_OPTIONS)
    add_servicer(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    _open_port(listener, server, address)
    servers = [server]
    if config.health_listen is not None:
        servers.append(_new_health_server(config.health_listen, health_servicer))
    signals = _Signals()
    for one in servers:
        await one.start()
    logger.info("serving %s at %s%s", service, address, ", with TLS" if listener.is_secure else "")
    if not listener.is_secure and not is_loopback(address.rpartition(":")[0]):
        logger.warning(
            "%s is in plaintext and accepts every caller: set `tls`, or keep it in a separate network", address
        )
    while worker.error is None and not await signals.came_within(_WATCH_SECONDS):
        status = (
            health_pb2.HealthCheckResponse.NOT_SERVING if worker.is_stuck else health_pb2.HealthCheckResponse.SERVING
        )
        for name in ("", service):
            await health_servicer.set(name, status)
    await health_servicer.enter_graceful_shutdown()
    draining = asyncio.create_task(worker.drain(config.drain_seconds))
    hurried = asyncio.create_task(signals.next())
    await asyncio.wait((draining, hurried), return_when=asyncio.FIRST_COMPLETED)
    await asyncio.gather(*(one.stop(grace=0.0 if hurried.done() else _LAST_WORDS_SECONDS) for one in servers))
    draining.cancel()
    hurried.cancel()
    return 0 if worker.error is None else 1


def _open_port(listener: Listener, server: grpc.aio.Server, address: str) -> None:
    """Opens the port. Raises ConfigurationError."""
    try:
        listener.open_port(server, address)
    except RuntimeError as error:
        # gRPC logs the reason; the address was free when it was checked before the model was loaded.
        raise AddressInUseError(f"cannot listen on {address}: is the port in use?") from error


def _new_health_server(address: str, servicer: Any) -> grpc.aio.Server:
    """Returns a server with a health service for callers without certificate and token, and nothing else."""
    plain = Listener()
    server = plain.new_server(SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    _open_port(plain, server, address)
    return server


class _Signals:
    """SIGTERM and SIGINT, one at a time."""

    def __init__(self) -> None:
        self._came = asyncio.Semaphore(0)
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._came.release)

    async def next(self) -> None:
        """Waits for the next signal."""
        await self._came.acquire()

    async def came_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self.next(), seconds)
        except TimeoutError:
            return False
        return True
