"""Checks the state of a program on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.config import Config
from cluster.config.router import RouterConfig
from cluster.placement.registry import Load
from cluster.speculation.demand import DraftDemand
from cluster.transport.dialing import Dialer
from protos.speculation.v1 import draft_pb2_grpc, target_pb2_grpc, types_pb2
from services.launch.foreground import get

_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Facts:
    """A worker's description of itself."""

    fingerprint: str | None = None
    load: Load | None = None


class Probe(Protocol):
    def problem(self) -> str | None:
        """Returns the reason why the program does not serve; None if it does."""

    def is_joined(self) -> bool:
        """Returns True if the program has found the others that it needs; a worker needs none."""

    def facts(self) -> Facts:
        """Returns the program's description of itself; empty if it reports none."""


class WorkerProbe:
    """Probes a target or a draft worker: gRPC's health service, and its description."""

    def __init__(self, pool: Literal["target", "draft"], address: str, config: Config) -> None:
        """Its callers trust its own certificate as well."""
        self._pool = pool
        self._address = address
        self._dialer = Dialer.of(config.tls, pool, getattr(config, pool).tls_server_name)
        self._dial()

    def _dial(self) -> None:
        self._version = self._dialer.version
        self._channel = self._dialer.blocking_channel(self._address)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        stub: Any = draft_pb2_grpc.DraftStub if self._pool == "draft" else target_pb2_grpc.TargetStub  # for grpc.aio
        self._describe = stub(self._channel).Describe

    def problem(self) -> str | None:
        try:
            status = self._health.Check(health_pb2.HealthCheckRequest(), timeout=_SECONDS).status
        except grpc.RpcError as error:
            if self._version != self._dialer.version:
                self._channel.close()
                self._dial()
            refusal = self._dialer.explain(error)
            return f"it does not answer at {self._address} ({error.code().name})" + (f": {refusal}" if refusal else "")
        return (
            None
            if status == health_pb2.HealthCheckResponse.SERVING
            else "its engine makes no progress, or it is ending"
        )

    def is_joined(self) -> bool:
        return True

    def facts(self) -> Facts:
        try:
            description = self._describe(types_pb2.DescribeRequest(), timeout=_SECONDS)
        except grpc.RpcError:
            return Facts()
        return Facts(description.model.tokenizer_fingerprint or None, _load(description.load))


class RouterProbe:
    def __init__(self, address: str, config: RouterConfig) -> None:
        self._url = f"{config.scheme}://{address}"
        self._certificate_file = config.tls_certificate_file

    def problem(self) -> str | None:
        return self._get("/health/live")

    def is_joined(self) -> bool:
        return self._get("/health") is None

    def _get(self, path: str) -> str | None:
        """Returns the problem with the answer at `path`; None if there is none."""
        try:
            with get(self._url + path, _SECONDS, None, self._certificate_file):
                return None
        except OSError as error:  # includes URLError
            return f"{self._url}{path} does not answer as it should ({error})"

    def facts(self) -> Facts:
        return Facts()


def _load(load: types_pb2.Load) -> Load:
    demand = None
    if load.HasField("draft_demand") and len(load.draft_demand.goodputs) > 1:
        demand = DraftDemand(load.draft_demand.num_sequences, tuple(load.draft_demand.goodputs))
    kv_use = load.num_used_blocks / load.num_blocks if load.num_blocks else 0.0
    counts = load.num_running, load.num_waiting, load.num_waiting_tokens
    return Load(*counts, kv_use, demand, load.num_limited, load.num_late)
