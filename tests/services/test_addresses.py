"""Addresses that cannot work are said before a model is loaded."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from cluster.errors import ConfigurationError
from services.addresses import check_can_listen, unknown_hosts
from tests.soak import length
from tests.waiting import WAIT_S

# Each is a program that imports what a worker needs.
WORKERS_AND_SETTINGS = length(
    [("target", "listen"), ("draft", "health_listen"), ("target", "metrics_port")],
    list(itertools.product(("target", "draft"), ("listen", "health_listen", "metrics_port"))),
)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_free_port_can_be_had() -> None:
    assert check_can_listen("127.0.0.1", 0, "x") > 0
    assert check_can_listen("localhost", 0, "x") > 0


def test_what_cannot_be_had_is_named(taken: int) -> None:
    with pytest.raises(
        ConfigurationError, match=f"cannot listen at 127.0.0.1:{taken}: Address already in use; set a.b"
    ):
        check_can_listen("127.0.0.1", taken, "set a.b")
    with pytest.raises(ConfigurationError, match=r"no-such-host\.invalid:1: "):
        check_can_listen("no-such-host.invalid", 1, "set a.b")
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1:1: Cannot assign"):
        check_can_listen("192.0.2.1", 1, "set a.b")
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1:99999: a port"):
        check_can_listen("127.0.0.1", 99999, "set a.b")


def test_hosts_without_an_address_are_found() -> None:
    addresses = ["127.0.0.1:1", "[::1]:1", "file:/x", "no-such-host.invalid:5", "dns:neither.invalid:5"]
    assert [complaint.partition(": ")[0] for complaint in unknown_hosts(addresses)] == addresses[3:]


@pytest.mark.parametrize(("program", "setting"), WORKERS_AND_SETTINGS)
def test_a_worker_says_so_before_it_loads_anything(taken: int, program: str, setting: str) -> None:
    value = str(taken) if setting == "metrics_port" else f"127.0.0.1:{taken}"
    arguments = ["--set", f"{program}.listen=127.0.0.1:0", f"--{program}.{setting}", value]
    command = [sys.executable, "-m", "services.cli", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == os.EX_TEMPFAIL
    assert "Address already in use" in done.stderr
    assert f"{program}.{setting}" in done.stderr
    assert "loading" not in done.stderr


def test_the_router_says_so_before_it_reads_a_tokenizer(taken: int) -> None:
    arguments = ["--router.port", str(taken), "--target.addresses", "[127.0.0.1:1]", "--target.model", "/nowhere"]
    command = [sys.executable, "-m", "services.cli", "router", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == os.EX_TEMPFAIL
    assert f"cannot listen at 127.0.0.1:{taken}" in done.stderr


@pytest.mark.parametrize("setting", ["router.port", "draft.metrics_port", "router.admin_listen"])
def test_the_launcher_says_so_before_it_starts_anything(taken: int, setting: str) -> None:
    value = f"127.0.0.1:{taken}" if setting == "router.admin_listen" else str(taken)
    command = [sys.executable, "-m", "services.cli", "serve", "--router.port", "0", f"--{setting}", value]
    command += ["--draft.placement", "pool"]
    began_at = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 2
    assert "Address already in use" in done.stderr
    assert "INFO" not in done.stderr
    assert time.monotonic() - began_at < 60
