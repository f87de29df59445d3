"""The programs of a cluster, from their own descriptions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from cluster.config.types import is_host_port
from cluster.errors import ConfigurationError
from cluster.transport.dialing import Dialer
from protos.speculation.v1 import draft_pb2_grpc, target_pb2_grpc, types_pb2
from services.http_call import call
from services.running_cluster.access import Access, PoolAccess
from services.running_cluster.pages import MetricsPage
from services.terminal import as_line

_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker, as it describes itself."""

    pool: str  # target or draft
    address: str
    model: types_pb2.ModelDescription
    load: types_pb2.Load
    machine: types_pb2.Machine
    wire_version: int
    epoch: int  # changes with each start
    clock_ahead_seconds: float  # minus ours, and half of the call's duration
    num_links: int = 0
    num_links_configured: int = 0
    max_speculative_tokens: int = 0

    @property
    def name(self) -> str:
        return f"{self.pool} {self.address}"


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """A router and the workers that it can reach."""

    url: str
    model: str  # the name that clients use
    version: str  # version of the router
    targets: tuple[WorkerFacts, ...]
    drafts: tuple[WorkerFacts, ...]
    unreachable: tuple[str, ...] = ()  # workers without an answer, and the reasons

    @property
    def workers(self) -> tuple[WorkerFacts, ...]:
        return *self.targets, *self.drafts

    def workers_by_name(self) -> set[tuple[str, str]]:
        """Returns the workers' names with their metrics pages, which differ after a restart."""
        return {(worker.name, worker.machine.metrics_url) for worker in self.workers}

    def target_pages(self, access: Access) -> list[MetricsPage]:
        return _pages(self.targets, access.target)

    def draft_pages(self, access: Access) -> list[MetricsPage]:
        """Returns the pages of the drafters; a drafter in a target's process has that target's page."""
        return _pages(self.drafts, access.draft)


def _pages(workers: Sequence[WorkerFacts], access: PoolAccess) -> list[MetricsPage]:
    without = [worker.name for worker in workers if not worker.machine.metrics_url]
    if without:
        raise ConfigurationError(f"{', '.join(without)}: no metrics page: set metrics_port")
    return [access.read_page(worker.machine.metrics_url, worker.address) for worker in workers]


def look_around(url: str, access: Access) -> ClusterFacts:
    """Returns the cluster behind the router at `url`. Raises ConfigurationError if none of its targets answers."""
    health = call(url, "GET", "/health", context=access.router.context)
    version = call(url, "GET", "/version", context=access.router.context)
    if not (_has(health, model=str, targets=list) and _has(version, version=str)):
        raise ConfigurationError(f"{url} does not answer as a router")
    if not all(_has(entry, address=str) for entry in health["targets"]):
        raise ConfigurationError(
            f"{url} does not report the addresses of its targets: give an operator's key, or use its "
            "router.admin_listen"
        )
    unreachable: list[str] = []
    addresses = [entry["address"] for entry in health["targets"]]
    targets = _describe_all(access.target, addresses, _describe_target, unreachable)
    if not targets:
        # In one line, as a worker may have sent the reason.
        raise ConfigurationError(f"no target of {url} answers: {as_line('; '.join(unreachable)) or 'it has none'}")
    drafts = _describe_all(access.draft, _draft_addresses(targets, access.target), _describe_draft, unreachable)
    return ClusterFacts(url, health["model"], version["version"], tuple(targets), tuple(drafts), tuple(unreachable))


def check_unchanged(facts: ClusterFacts, access: Access) -> None:
    """Raises ConfigurationError if a worker has ended or was restarted since."""
    gone: list[str] = []  # missing in `found`
    found = [
        *_describe_all(access.target, [worker.address for worker in facts.targets], _describe_target, gone),
        *_describe_all(access.draft, [worker.address for worker in facts.drafts], _describe_draft, gone),
    ]
    restarted = {(worker.name, worker.epoch) for worker in facts.workers} - {
        (worker.name, worker.epoch) for worker in found
    }
    if restarted:
        names = ", ".join(sorted(name for name, _ in restarted))
        raise ConfigurationError(f"{names} of {facts.url} ended or restarted under the load: run this again")


def _describe_all(
    access: PoolAccess,
    addresses: Iterable[str],
    describe: Callable[[str, Dialer], WorkerFacts],
    unreachable: list[str],
) -> list[WorkerFacts]:
    """Returns the facts of those that answer; appends the reasons of the others to `unreachable`."""
    found = []
    for address in addresses:
        if not is_host_port(address):  # gRPC would also dial this machine's sockets if an address names one
            unreachable.append(f"{access.pool} {address}: it is no host:port")
            continue
        try:
            found.append(describe(address, access.dialer))
        except grpc.RpcError as error:
            unreachable.append(f"{access.pool} {address}: {_reason(error, access.dialer)}")
    return found


def _has(answer: Any, **fields: type) -> bool:
    return isinstance(answer, dict) and all(isinstance(answer.get(name), kind) for name, kind in fields.items())


def _draft_addresses(targets: Sequence[WorkerFacts], access: PoolAccess) -> list[str]:
    """Returns the draft workers of the targets' links, former ones too; a drafter in the target's process has none."""
    found: set[str] = set()
    for page in _pages(targets, access):
        found |= page.by_label("outrider_link_bytes_total", "draft").keys()
    return sorted(found)


def _describe_target(address: str, dialer: Dialer) -> WorkerFacts:
    with dialer.blocking_channel(address) as channel:
        said, ahead = _timed(target_pb2_grpc.TargetStub(channel).Describe)  # type: ignore[arg-type]  # likewise
    return WorkerFacts(
        "target",
        address,
        said.model,
        said.load,
        said.machine,
        said.wire_version,
        said.epoch,
        ahead,
        said.num_draft_links,
        said.num_draft_links_configured,
        said.max_speculative_tokens,
    )


def _describe_draft(address: str, dialer: Dialer) -> WorkerFacts:
    with dialer.blocking_channel(address) as channel:
        said, ahead = _timed(draft_pb2_grpc.DraftStub(channel).Describe)  # type: ignore[arg-type]  # made for async ones
    return WorkerFacts("draft", address, said.model, said.load, said.machine, said.wire_version, said.epoch, ahead)


def _timed(describe: Any) -> tuple[Any, float]:
    describe(types_pb2.DescribeRequest(), timeout=_SECONDS)  # the connection is made with the first call
    asked_at = time.time()
    said = describe(types_pb2.DescribeRequest(), timeout=_SECONDS)
    return said, said.machine.unix_seconds - (asked_at + time.time()) / 2


def _reason(error: grpc.RpcError, dialer: Dialer) -> str:
    return dialer.explain(error) or (str(error.details()) if isinstance(error, grpc.Call) else str(error))
