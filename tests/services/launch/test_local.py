"""Tests of the launcher's decisions before it starts anything."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from cluster.config.file import load_config
from cluster.errors import ConfigurationError
from services.launch import local
from services.launch.host_cores import Core
from services.launch.local import LocalCluster, free_ports
from tests.system.conftest import READY_TIMEOUT_SECONDS
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("num_cores", "overrides", "max_run_ahead"),
    [
        (2, ["draft.placement=pool"], 0),
        (64, [], None),
        (2, ["draft.placement=pool", "speculation.max_run_ahead=7"], 7),
        (2, ["draft.cpus=[1]"], None),
        (2, ["draft.cpus=[1]", "target.cpus=[0]"], None),
        (2, ["draft.cpus=[1]", "target.cpus=[0,1]"], 0),
        (2, ["speculation.num_speculative_tokens=0"], None),
        (2, ["draft.placement=in-process", "draft.in_process_threads=own"], 0),
        (64, ["draft.placement=in-process", "draft.in_process_threads=own"], None),
    ],
)
def test_a_draft_on_the_targets_cores_does_not_run_ahead(
    num_cores: int, overrides: list[str], max_run_ahead: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    cluster = LocalCluster(load_config(None, ["router.port=0", *overrides]))
    assert cluster.config.speculation.max_run_ahead == max_run_ahead


def test_a_draft_on_the_hosts_processors_gets_cores_that_its_target_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "read_cores", lambda: [Core((cpu,)) for cpu in range(12)])
    settings = ["router.port=0", "draft.placement=host-cpu", "target.device=cuda", "target.replicas=2"]
    cluster = LocalCluster(load_config(None, settings))
    assert [worker.cpus for worker in cluster.drafts] == [(10, 11), (8, 9)]
    assert [worker.cpus for worker in cluster.targets] == [tuple(range(8))] * 2
    assert cluster.config.speculation.max_run_ahead is None


def test_each_of_several_workers_has_a_name_and_an_address() -> None:
    cluster = LocalCluster(load_config(None, ["router.port=0", "target.replicas=2", "draft.placement=pool"]))
    assert [worker.name for worker in (*cluster.targets, *cluster.drafts)] == ["target 0", "target 1", "draft"]
    assert [worker.address for worker in cluster.targets] == list(cluster.config.target.addresses)


def test_too_few_cores_for_a_draft_on_the_hosts_processors_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "read_cores", lambda: [Core((cpu,)) for cpu in range(4)])
    with pytest.raises(ConfigurationError, match="0 of 4 cores are free, and each of 1 draft workers"):
        LocalCluster(load_config(None, ["router.port=0", "draft.placement=host-cpu", "target.device=cuda"]))


@pytest.mark.parametrize(
    ("host", "reached"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("127.0.0.7", "127.0.0.7")],
)
def test_metrics_pages_are_found_where_they_listen(host: str, reached: str) -> None:
    settings = [f"target.metrics_host={host!r}", "target.metrics_port=9100", "router.port=0", "draft.placement=pool"]
    cluster = LocalCluster(load_config(None, settings))
    assert cluster.targets[0].metrics_url == f"http://{reached}:9100/metrics"
    assert cluster.drafts[0].metrics_url.startswith("http://127.0.0.1:")


def test_free_ports_are_none_that_a_caller_may_be_given() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert not [port for port in ports if first <= port <= last]


def test_free_ports_of_many_calls_differ() -> None:
    """Those of one cluster come from several calls, before any of its programs listens."""
    ports = [port for _ in range(1000) for port in free_ports(1)]
    assert len(set(ports)) == 1000


def test_an_address_that_is_not_here_has_no_free_ports() -> None:
    with pytest.raises(OSError, match="assign"):
        free_ports(1, "192.0.2.1")


def test_a_program_whose_port_was_taken_in_between_is_started_again() -> None:
    settings = ["router.port=0", "target.engine=simulated", "draft.drafter=simulated"]
    cluster = LocalCluster(load_config(None, settings))
    host, _, port = cluster.config.draft.addresses[0].rpartition(":")
    with socket.create_server((host, int(port))) as squatter, cluster:
        (draft,) = cluster.drafts
        first = draft.pid

        def is_another() -> bool:
            cluster.watch()
            return draft.pid != first

        wait_until(is_another)
        squatter.close()
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
