from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from cluster.errors import ConfigurationError
from services.running_cluster.access import Access
from services.running_cluster.workers import look_around
from tests.http_server import HttpAnswer, answering


@pytest.fixture
def router() -> Iterator[Callable[..., str]]:
    """Makes a program that answers each path with what it is given for it; returns its address."""
    with ExitStack() as servers:

        def make(**answers: Any) -> str:
            return servers.enter_context(
                answering(lambda request: HttpAnswer(json.dumps(answers[request.path.strip("/")])))
            ).url

        yield make


@pytest.mark.parametrize(
    ("health", "version"),
    [
        ([], {"version": "1"}),
        ({"status": "ok"}, {"version": "1"}),
        ({"model": "m", "targets": None}, {"version": "1"}),
        ({"model": "m", "targets": []}, ["1"]),
    ],
)
def test_what_is_no_router_is_told(health: Any, version: Any, router: Callable[..., str]) -> None:
    with pytest.raises(ConfigurationError, match="does not answer as a router"):
        look_around(router(health=health, version=version), Access())


def test_without_an_operators_key_it_is_said_what_is_missing(router: Callable[..., str]) -> None:
    url = router(health={"model": "m", "targets": [{"problem": None}]}, version={"version": "1"})
    with pytest.raises(ConfigurationError, match="give an operator's key"):
        look_around(url, Access())


@pytest.mark.parametrize("address", ["unix:/run/somebody.sock", "dns:///127.0.0.1:1", "127.0.0.1", "a:1\nall is well"])
def test_only_hosts_are_dialled(address: str, router: Callable[..., str]) -> None:
    url = router(health={"model": "m", "targets": [{"address": address}]}, version={"version": "1"})
    with pytest.raises(ConfigurationError, match="it is no host:port") as raised:
        look_around(url, Access())
    assert "\n" not in str(raised.value)


def test_targets_that_do_not_answer_are_named(router: Callable[..., str]) -> None:
    url = router(health={"model": "m", "targets": [{"address": "127.0.0.1:1"}]}, version={"version": "1"})
    with pytest.raises(ConfigurationError, match=r"no target of .* answers: target 127\.0\.0\.1:1: "):
        look_around(url, Access())
