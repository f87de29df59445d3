"""Listening addresses of programs on this node."""

from __future__ import annotations

import socket
from typing import Any

import ray

from cluster.config.workers import WorkerConfig
from services.launch.local import free_ports


def free_address() -> str:
    """Returns a free port of this node's own address."""
    node = ray.util.get_node_ip_address()
    return host_port(node, free_ports(1, node)[0])


def listening_at(worker: WorkerConfig, address: str) -> dict[str, Any]:
    """Returns the settings for a worker that listens only at `address`, and serves metrics if it can."""
    metrics_port = worker.metrics_port or 0
    if not is_free(worker.metrics_host, metrics_port):  # another of the pool is on this node
        metrics_port = 0
    return {
        "addresses": (address,),
        "listen": address,
        "advertise": None,
        "metrics_port": metrics_port,
        "health_listen": None,
    }


def host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
