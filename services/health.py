"""`outrider health`: whether a program answers, for the health check of a container."""

from __future__ import annotations

import argparse
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.errors import ConfigurationError

_TIMEOUT_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "address",
        nargs="?",
        default="http://127.0.0.1:8000",
        help="http://HOST:PORT of a router (default: http://127.0.0.1:8000), HOST:PORT of a worker",
    )
    parser.epilog = "example: outrider health 127.0.0.1:7000"


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigurationError when what is at the address does not answer, or says that it does not serve."""
    address: str = arguments.address
    try:
        if address.startswith("http://"):
            with urllib.request.urlopen(f"{address}/health/live", timeout=_TIMEOUT_SECONDS):
                pass
        else:
            _check_worker(address)
    except (OSError, ValueError, grpc.RpcError) as error:
        raise ConfigurationError(f"{address} does not answer: {error}") from error
    print(f"{address} answers")
    return 0


def _check_worker(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_SECONDS)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise ValueError(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
