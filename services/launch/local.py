"""Runs a whole cluster on this machine: router, target and draft workers as processes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from cluster.config import Config
from cluster.config.simulation import SimulationConfig
from cluster.errors import ConfigurationError, UnavailableError
from cluster.owned_folder import OwnedFolder
from cluster.telemetry.logs import LOG_NAME
from services.addresses import check_can_listen, check_metrics_page, split
from services.http_call import LAUNCHER_KEY_SHA256
from services.launch.checks import check_models
from services.launch.child import Child, end_all
from services.launch.cores import CoreShares, divide_cores
from services.launch.foreground import StopSignals, announce, read_health
from services.launch.host_cores import read_cores, share_host_cores
from services.launch.memory import share_memory
from services.launch.place_draft import place_draft, target_has_gpu

logger = logging.getLogger(__name__)

# Below Linux's ephemeral ports (net.ipv4.ip_local_port_range), above those of Ray's workers.
# In order, so that a port is not chosen again before its program listens; each process has its own order.
_PORTS = range(20_000, 32_000)
_PORTS_IN_TURN = itertools.cycle(random.sample(_PORTS, len(_PORTS)))
_PORT_TRIES = 100
_POLL_SECONDS = 0.05
READY_SECONDS = 600.0  # loading a large model may take minutes
_END_SECONDS = 5.0  # in addition to the time that a program may drain


class WorkerProcess(Child):
    """A target or draft worker of the cluster, with its assigned address and cores."""

    def __init__(
        self,
        config_file: Path,
        config: Config,
        pool: str,
        index: int,
        *settings: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`settings`: those that are not in the file."""
        worker = config.target if pool == "target" else config.draft
        metrics_port: int | None = None
        self.metrics_url: str | None = None  # None: no page
        if worker.metrics_port is not None:
            metrics_port = (worker.metrics_port if index == 0 else 0) or free_ports(1)[0]
            scheme = "https" if config.tls.is_on else "http"
            self.metrics_url = f"{_local_url(scheme, worker.metrics_host, metrics_port)}/metrics"
        arguments = [
            *(pool, "--config", str(config_file)),
            *("--set", f"{pool}.addresses=[{worker.addresses[index]!r}]"),
            *("--set", f"{pool}.metrics_port={'null' if metrics_port is None else metrics_port}"),
            *(argument for setting in settings for argument in ("--set", setting)),
        ]
        self.cpus = worker.cpus
        if worker.cpus is None and (worker.device != "cuda" or config.drafts_on_host_cpu):
            shares = _core_shares(config)
            self.cpus = (shares.targets if pool == "target" else shares.drafts)[index]
            if self.cpus is not None:
                arguments += ["--set", f"{pool}.cpus={list(self.cpus)}"]
        self.address = worker.addresses[index]
        name = pool if worker.replicas == 1 else f"{pool} {index}"
        super().__init__(name, arguments, environment={LOG_NAME: name, **(environment or {})}, address=self.address)


class Proxy(Child):
    """Delays the traffic of the draft worker at `draft_address`."""

    def __init__(self, address: str, draft_address: str, simulation: SimulationConfig) -> None:
        self.address = address
        arguments = [
            *("--listen", address, "--to", draft_address),
            *("--round-trip-ms", str(simulation.round_trip_ms), "--loss", str(simulation.loss)),
        ]
        super().__init__("delay proxy", arguments, module="services.launch.delay_proxy")


class LocalCluster:
    """A cluster of processes.

        with LocalCluster(config) as cluster:
            cluster.wait_ready(timeout=60)
            ... cluster.url ...

    Raises ConfigurationError if the router's port is taken, the models cannot work, or a program cannot start.
    """

    def __init__(self, config: Config, environments: Mapping[str, Mapping[str, str]] | None = None) -> None:
        """`environments`: additions to environments, by pool (`target`) or worker (`target 0`)."""
        added = environments or {}

        def environment(pool: str, index: int) -> dict[str, str]:
            return {**added.get(pool, {}), **added.get(f"{pool} {index}", {})}

        placed, why = place_draft(config)
        self.config = _resolve(placed)
        _check_pages(self.config)
        check_models(self.config)
        if why is not None:
            logger.info("draft.placement auto: %s, as %s", placed.draft.placement, why)
        self._folder = OwnedFolder("outrider-serve-")
        config_file = self._folder.path / "cluster.yaml"
        self.proxies = _proxies(self.config)
        # With proxies, callers dial the proxies, and the draft workers listen behind them.
        called = self.config
        if self.proxies:
            addresses = tuple(proxy.address for proxy in self.proxies)
            called = called.model_copy(update={"draft": called.draft.model_copy(update={"addresses": addresses})})
        config_file.write_text(yaml.safe_dump(called.model_dump(mode="json")), encoding="utf-8")
        self.drafts = [
            WorkerProcess(config_file, self.config, "draft", i, environment=environment("draft", i))
            for i in range(self.config.draft.replicas)
        ]
        self.targets = [
            WorkerProcess(
                config_file, self.config, "target", i, *_own_drafts(called, i), environment=environment("target", i)
            )
            for i in range(self.config.target.replicas)
        ]
        # It opens the pages about the cluster's state if the router asks for keys. It stays in this process.
        self._key = secrets.token_urlsafe(32)
        key_hash = {LAUNCHER_KEY_SHA256: hashlib.sha256(self._key.encode()).hexdigest()}
        router = self.config.router
        self.router = Child(
            *("router", ["router", "--config", str(config_file)]),
            environment=key_hash,
            address=_local_url(router.scheme, router.host, router.port).partition("//")[2],
        )

    @property
    def url(self) -> str:
        return _local_url(self.config.router.scheme, self.config.router.host, self.config.router.port)

    @property
    def metrics_urls(self) -> dict[str, str]:
        """Metrics pages by program."""
        workers = {worker.name: worker.metrics_url for worker in (*self.targets, *self.drafts)}
        pages = {name: url for name, url in workers.items() if url is not None}
        return {"router": f"{self.url}/metrics", **pages}

    @property
    def programs(self) -> dict[str, str]:
        """Address and process ID by program, once they are started."""
        workers = {worker.name: f"{worker.address}, process {worker.pid}" for worker in (*self.targets, *self.drafts)}
        return {"router": f"{self.url}, process {self.router.pid}", **workers}

    @property
    def _children(self) -> list[Child]:
        return [*self.drafts, *self.proxies, *self.targets, self.router]

    def start(self) -> None:
        for child in self._children:
            child.start()

    def watch(self) -> None:
        """Restarts programs that died. Raises ConfigurationError if one can never start."""
        for child in self._children:
            child.watch()

    def health(self) -> dict[str, Any] | None:
        """Returns the router's /health; None unless the whole path can answer."""
        return read_health(self.url, self._key, self.config.router.tls_certificate_file)

    def is_ready(self) -> bool:
        """Returns True if every program runs, every target answers and all of its links are up."""
        if any(child.has_ended() for child in self._children):
            return False  # the router may not have noticed it yet
        health = self.health()
        if health is None:
            return False
        targets = health["targets"]
        return len(targets) == len(self.targets) and all(
            target["problem"] is None and target["num_draft_links"] == target["num_draft_links_configured"]
            for target in targets
        )

    def wait_ready(self, timeout: float = READY_SECONDS) -> None:
        """Raises UnavailableError if the cluster is not ready after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self.is_ready():
            self.watch()
            if time.monotonic() > deadline:
                raise UnavailableError(f"the cluster is not ready after {timeout:.0f} s")
            time.sleep(_POLL_SECONDS)

    def stop(self, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Lets running requests finish, each program within its time; kills all at once if `is_hurried`.

        The router ends first, then the targets, which get no more calls, then the drafts.
        """
        router, target, draft = self.config.router, self.config.target, self.config.draft
        workers = [*self.proxies, *self.drafts]

        def watch_workers() -> None:
            """Restarts workers that die while others drain; one that cannot start again does not stop the shutdown."""
            for worker in (*self.targets, *workers):
                with contextlib.suppress(ConfigurationError):
                    worker.watch()

        end_all([self.router], router.drain_seconds + _END_SECONDS, is_hurried, watch_workers)
        end_all(self.targets, target.drain_seconds + _END_SECONDS, is_hurried)
        end_all(workers, draft.drain_seconds + _END_SECONDS, is_hurried)
        self._folder.remove()

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def serve(config: Config, opens_page: bool = False) -> int:
    """Runs a cluster until SIGINT or SIGTERM, then drains it until a second signal. Returns the exit code."""
    signals = StopSignals()
    started_at = time.monotonic()
    is_announced = False
    cluster = LocalCluster(config)
    try:
        cluster.start()
        while not signals.count:
            cluster.watch()
            if not is_announced and cluster.is_ready():
                is_announced = True
                seconds = time.monotonic() - started_at
                announce(
                    *(cluster.config, [cluster.url], seconds, cluster.programs, cluster.metrics_urls),
                    opens_page=opens_page,
                )
            time.sleep(_POLL_SECONDS if not is_announced else 0.2)
        logger.info("stopping after running requests have ended; press Ctrl-C again to stop at once")
    finally:
        cluster.stop(signals.is_hurried)
    return 0


def _local_url(scheme: str, host: str, port: int) -> str:
    """Returns the URL of a server of this machine that listens at `host`, which may stand for all its addresses."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{reached}]:{port}" if ":" in reached else f"{scheme}://{reached}:{port}"


def _core_shares(config: Config) -> CoreShares:
    if config.target.engine == "simulated":  # it computes nothing
        return CoreShares((None,) * config.target.replicas, (None,) * config.draft.replicas)
    if config.drafts_on_host_cpu:
        return share_host_cores(config, read_cores(), target_has_gpu=target_has_gpu(config))
    cpus = sorted(os.sched_getaffinity(0))
    return divide_cores(cpus, config.target.replicas, config.draft.replicas, drafts_beside_targets=config.has_sidecars)


def _own_drafts(config: Config, index: int) -> list[str]:
    """Returns the setting that gives a target its own draft workers, if each has some of its own."""
    if not config.has_sidecars:
        return []
    number = config.draft.replicas // config.target.replicas
    return [f"draft.addresses={list(config.draft.addresses[index * number :][:number])}"]


def _drafts_share_cores(config: Config) -> bool:
    if config.drafts_in_process:
        num_targets = config.target.replicas
        return divide_cores(sorted(os.sched_getaffinity(0)), num_targets, num_targets).drafts_share
    if config.draft.device == "cuda":
        return False
    if config.draft.cpus is not None:
        return config.target.device != "cuda" and not set(config.draft.cpus).isdisjoint(config.target.cpus or ())
    return _core_shares(config).drafts_share


def _resolve(config: Config) -> Config:
    """Returns `config` with all of the launcher's decisions: addresses, ports, no draft for k = 0, run-ahead."""
    if not config.has_draft_workers:
        config = config.model_copy(update={"draft": config.draft.model_copy(update={"replicas": 0})})
    elif config.has_sidecars:
        number = config.draft.replicas * config.target.replicas
        config = config.model_copy(update={"draft": config.draft.model_copy(update={"replicas": number})})
    if _drafts_share_cores(config) and config.speculation.max_run_ahead is None:
        # On shared cores run-ahead takes time from the target, and is right one time in three or four. Of 2k+2, k+2
        # and k tokens, k was as good as k+2 and a tenth faster than 2k+2 (190M target, 2 cores).
        config = config.model_copy(update={"speculation": config.speculation.model_copy(update={"max_run_ahead": 0})})
    target_ports = free_ports(config.target.replicas)
    draft_ports = free_ports(config.draft.replicas)
    port = _router_port(config)

    def placed(ports: list[int]) -> dict[str, object]:
        """Returns the workers' addresses. Those in the configuration are for programs that are started separately."""
        addresses = tuple(f"127.0.0.1:{port}" for port in ports)
        return {"addresses": addresses, "listen": None, "advertise": None, "health_listen": None}

    config = share_memory(config)
    return config.model_copy(
        update={
            "target": config.target.model_copy(update=placed(target_ports)),
            "draft": config.draft.model_copy(update=placed(draft_ports)),
            "router": config.router.model_copy(update={"port": port}),
        }
    )


def _proxies(config: Config) -> list[Proxy]:
    """Returns a proxy for each draft worker, if the simulation has a network."""
    drafts = config.draft.addresses
    if not config.simulation.needs_proxy:
        return []
    ports = free_ports(len(drafts))
    return [Proxy(f"127.0.0.1:{port}", draft, config.simulation) for port, draft in zip(ports, drafts, strict=True)]


def _router_port(config: Config) -> int:
    """Returns the router's port, which is free; port 0 becomes any free one. Raises ConfigurationError."""
    host, port = config.router.host, config.router.port
    if port == 0:
        with contextlib.suppress(OSError):  # problems of the host are reported below
            port = free_ports(1, host)[0]
    return check_can_listen(host, port, "choose another with --port")


def _check_pages(config: Config) -> None:
    """Checks that the other listeners can listen. Raises ConfigurationError."""
    if config.router.admin_listen is not None:
        check_can_listen(*split(config.router.admin_listen), "set router.admin_listen")
    for pool, worker in (("target", config.target), ("draft", config.draft)):
        if worker.replicas:
            check_metrics_page(worker, pool)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Returns free ports of `host`; repeats none in this process before all have been used.

    Avoids the ports that the system gives to outgoing connections. A program listens only after it has loaded its
    model; until then such a port may become another connection's, even that of the caller who tries to reach the
    program.
    """
    probes = [socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) for _ in range(count)]
    try:
        for probe in probes:
            _bind_somewhere(probe, host)
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _bind_somewhere(probe: socket.socket, host: str) -> None:
    """Binds `probe` to a free port. Raises OSError if that is impossible."""
    for port in itertools.islice(_PORTS_IN_TURN, _PORT_TRIES):
        try:
            probe.bind((host, port))
            return
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):  # another port would not help
                raise
    probe.bind((host, 0))
