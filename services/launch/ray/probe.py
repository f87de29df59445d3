"""Asks a program on this machine how it is."""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.placement.registry import Load
from cluster.speculation.demand import DraftDemand
from protos.speculation.v1 import draft_pb2_grpc, target_pb2_grpc, types_pb2

_SECONDS = 3.0
_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    # A program that is loading is asked all the time, and should be found soon after it listens.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a worker says of itself."""

    fingerprint: str | None = None
    load: Load | None = None


class Probe(Protocol):
    def problem(self) -> str | None:
        """Why it does not serve; None: it does."""

    def is_joined(self) -> bool:
        """Whether it knows those whom it needs; a worker needs nobody."""

    def facts(self) -> Facts:
        """Empty where it does not say."""


class WorkerProbe:
    """Of a target or a draft worker: gRPC's health service, and its description."""

    def __init__(self, pool: str, address: str) -> None:
        self._address = address
        self._channel = grpc.insecure_channel(address, _CHANNEL_OPTIONS)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        stub: Any = draft_pb2_grpc.DraftStub if pool == "draft" else target_pb2_grpc.TargetStub  # typed for grpc.aio
        self._describe = stub(self._channel).Describe

    def problem(self) -> str | None:
        try:
            status = self._health.Check(health_pb2.HealthCheckRequest(), timeout=_SECONDS).status
        except grpc.RpcError as error:
            return f"it does not answer at {self._address} ({error.code().name})"
        return None if status == health_pb2.HealthCheckResponse.SERVING else "its engine stands still or it is ending"

    def is_joined(self) -> bool:
        return True

    def facts(self) -> Facts:
        try:
            description = self._describe(types_pb2.DescribeRequest(), timeout=_SECONDS)
        except grpc.RpcError:
            return Facts()
        return Facts(description.model.tokenizer_fingerprint or None, _load(description.load))


class RouterProbe:
    def __init__(self, address: str) -> None:
        self._url = f"http://{address}"

    def problem(self) -> str | None:
        return self._get("/health/live")

    def is_joined(self) -> bool:
        return self._get("/health") is None

    def _get(self, path: str) -> str | None:
        """None, or why the answer is not that all is well."""
        try:
            with urllib.request.urlopen(self._url + path, timeout=_SECONDS):
                return None
        except (urllib.error.URLError, OSError) as error:
            return f"{self._url}{path} does not answer as it should ({error})"

    def facts(self) -> Facts:
        return Facts()


def _load(load: types_pb2.Load) -> Load:
    demand = None
    if load.HasField("draft_demand") and len(load.draft_demand.goodputs) > 1:
        demand = DraftDemand(load.draft_demand.num_sequences, tuple(load.draft_demand.goodputs))
    kv_use = load.num_used_blocks / load.num_blocks if load.num_blocks else 0.0
    return Load(load.num_running, load.num_waiting, load.num_waiting_tokens, kv_use, demand)
