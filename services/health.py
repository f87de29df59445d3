"""`outrider health`: whether a program answers, for the health check of a container."""

from __future__ import annotations

import argparse

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.config_types import is_host_port
from cluster.errors import ConfigurationError
from services.http_call import call

_SCHEME = "http://"
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
    if address.startswith(_SCHEME):
        call(address.removeprefix(_SCHEME).rstrip("/"), "GET", "/health/live", seconds=_TIMEOUT_SECONDS)
    else:
        _check_worker(address)
    print(f"{address} answers")
    return 0


def _check_worker(address: str) -> None:
    if not is_host_port(address):
        raise ConfigurationError(f"{address!r} is neither http://host:port nor host:port")
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            check = health_pb2_grpc.HealthStub(channel).Check
            answer = check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            status = error.code().name if isinstance(error, grpc.Call) else type(error).__name__
            raise ConfigurationError(f"{address} does not answer: {status}") from error
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        state = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise ConfigurationError(f"{address} does not serve: {state}")
