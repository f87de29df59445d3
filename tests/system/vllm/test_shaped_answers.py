"""Log-probabilities and constraints on vLLM: with speculation, without it, and as our own engine answers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from services.launch.local import LocalCluster
from tests.soak import length
from tests.system.shaped_cases import Body, answer, assert_alike, one_of_each_constraint, shaped_bodies, streamed
from tests.system.support import assert_table_is_true
from tests.system.vllm.programs import Programs

BODIES = length(one_of_each_constraint(), dict(shaped_bodies()))
SOME = one_of_each_constraint()  # an answer of vLLM on this CPU takes a second


@pytest.fixture(scope="module")
def client(programs: Programs) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=programs.url, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def plain(programs: Programs, client: httpx.Client) -> dict[str, list[Body]]:
    programs.use()
    return {name: answer(client, {**body, "num_speculative_tokens": 0}) for name, body in BODIES.items()}


@pytest.mark.parametrize(("draft", "bodies"), [("right", BODIES), ("random", SOME)])
def test_speculation_changes_nothing(
    programs: Programs, client: httpx.Client, plain: dict[str, list[Body]], draft: str, bodies: dict[str, Body]
) -> None:
    programs.use(draft)
    with ThreadPoolExecutor(6) as threads:
        drafted = threads.map(lambda body: answer(client, {**body, "num_speculative_tokens": 4}), bodies.values())
        for name, choices in zip(bodies, drafted, strict=True):
            assert_alike(plain[name], choices)


def test_nor_does_streaming(client: httpx.Client, plain: dict[str, list[Body]]) -> None:
    for name, body in SOME.items():
        assert_alike(plain[name], streamed(client, body))


def test_nor_does_the_engine(cluster: LocalCluster, plain: dict[str, list[Body]]) -> None:
    with httpx.Client(base_url=cluster.url, timeout=300) as other:
        for name, body in BODIES.items():
            assert_alike(plain[name], answer(other, body))


def test_constraints_that_leave_nothing_end_the_request(client: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 5, "allowed_token_ids": [40], "bad_words": ["I"], "guided_regex": "[0-9]+"}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 400, response.text
    assert "allow no next token" in response.json()["error"]["message"]
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3}).status_code == 200


def test_what_the_page_says_is_supported_is(client: httpx.Client, programs: Programs) -> None:
    assert_table_is_true(programs.url, "vllm")
