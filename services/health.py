"""`outrider health`: checks that a program answers, for the health check of a container."""

from __future__ import annotations

import argparse
import os
import ssl
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.config.file import load_config
from cluster.config.types import is_host_port
from cluster.errors import ConfigurationError
from cluster.transport.dialing import Dialer
from services.http_call import API_KEY, add_trust_arguments, call, trusted_context
from services.terminal import as_lines

_SCHEMES = ("http://", "https://")
_TIMEOUT_SECONDS = 5.0
_MAX_HEALTH_BYTES = 4 * 2**20  # thousands of targets
_UNAVAILABLE = 503  # status of /health if no target can answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "address",
        nargs="?",
        default="http://127.0.0.1:8000",
        help="http[s]://HOST:PORT of a router (default: http://127.0.0.1:8000), HOST:PORT of a worker",
    )
    add_trust_arguments(parser)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML configuration with the `tls` that a worker requires"
    )
    parser.add_argument(
        "--as",
        dest="program",
        choices=("router", "target", "draft"),
        default="router",
        help="the program whose files are used, if they differ (default: router)",
    )
    parser.add_argument("--server-name", metavar="NAME", help="name in the worker's certificate (default: HOST)")
    parser.epilog = "example: outrider health 127.0.0.1:7000"


def run(arguments: argparse.Namespace) -> int:
    """Prints that the address answers and, of a router, which targets are up. Returns 0, even if none is.

    Raises ConfigurationError if the address does not answer, or reports that it does not serve.
    """
    address: str = arguments.address
    if address.startswith(_SCHEMES):
        context = trusted_context(arguments)
        call(address, "GET", "/health/live", seconds=_TIMEOUT_SECONDS, context=context)
        print(as_lines([f"{address} answers", *_targets(address, context)]))
    else:
        tls = load_config(arguments.config, environment=os.environ).tls
        _check_worker(address, Dialer.of(tls, arguments.program, arguments.server_name))
        print(f"{address} answers")
    return 0


def _targets(url: str, context: ssl.SSLContext | None) -> list[str]:
    """Returns how many targets of the router are up, and a line for each that is not.

    Returns one line if the router does not list them: its public address requires a key.
    """
    try:
        health = call(
            *(url, "GET", "/health"),
            seconds=_TIMEOUT_SECONDS,
            context=context,
            max_bytes=_MAX_HEALTH_BYTES,
            accepted_error=_UNAVAILABLE,
        )
        states = [(one.get("address", "a target"), one["status"], one["problem"]) for one in health["targets"]]
    except (ConfigurationError, KeyError, TypeError, AttributeError):
        return [f"its targets are not listed; a router with keys lists them for one in {API_KEY}"]
    not_up = [f"  {address} is {status}: {problem}" for address, status, problem in states if status != "up"]
    return [f"{len(states) - len(not_up)} of {len(states)} targets are up", *not_up]


def _check_worker(address: str, dialer: Dialer) -> None:
    if not is_host_port(address):
        raise ConfigurationError(f"{address!r} is neither http://host:port nor host:port")
    with dialer.blocking_channel(address) as channel:
        try:
            check = health_pb2_grpc.HealthStub(channel).Check
            answer = check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            status = error.code().name if isinstance(error, grpc.Call) else type(error).__name__
            refusal = dialer.explain(error)
            raise ConfigurationError(
                f"{address} does not answer: {status}{f': {refusal}' if refusal else ''}"
            ) from error
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        state = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise ConfigurationError(f"{address} does not serve: {state}")
