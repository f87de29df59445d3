"""A client that leaves while its request waits, or is in prefill, frees everything at once."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator

import httpx
import pytest

from bench.workload import read_counters
from services.launch.local import LocalCluster
from tests.system.client import assert_nothing_in_use
from tests.system.conftest import READY_TIMEOUT_SECONDS, cluster_config
from tests.waiting import WAIT_S, eventually, wait_until

LONG_PROMPT = [300 + i % 50 for i in range(2000)]
CHUNK = 2


@pytest.fixture(scope="module")
def narrow() -> Iterator[LocalCluster]:
    """One sequence at a time, and prompts in small chunks."""
    chunks = f"target.max_num_batched_tokens={CHUNK}"
    with LocalCluster(cluster_config("target.max_num_seqs=1", chunks)) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        yield cluster


def reading(cluster: LocalCluster, name: str) -> float:
    return read_counters(cluster.targets[0].metrics_url)[name]


def leave(cluster: LocalCluster, prompt: list[int], when: Callable[[], bool]) -> None:
    """Sends a request, and closes its connection as soon as `when` is true."""
    body = json.dumps({"prompt": prompt, "max_tokens": 8}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
    with socket.create_connection(("127.0.0.1", cluster.config.router.port)) as connection:
        connection.sendall(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(when)


def test_in_prefill(narrow: LocalCluster) -> None:
    committed = reading(narrow, "outrider_committed_tokens_total")
    prefilled = reading(narrow, "outrider_steps_total:prefill")
    leave(narrow, LONG_PROMPT, lambda: reading(narrow, "outrider_steps_total:prefill") > prefilled)
    assert_nothing_in_use(narrow)
    num_chunks = reading(narrow, "outrider_steps_total:prefill") - prefilled
    assert 0 < num_chunks < len(LONG_PROMPT) // CHUNK
    assert reading(narrow, "outrider_committed_tokens_total") == committed


def test_while_waiting(narrow: LocalCluster) -> None:
    long_answer = {"prompt": [300], "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(base_url=narrow.url, timeout=WAIT_S) as client,
        client.stream("POST", "/v1/completions", json=long_answer) as reply,
    ):
        lines = reply.iter_lines()  # which ends the stream when it is thrown away
        next(lines)
        leave(narrow, LONG_PROMPT, lambda: reading(narrow, "vllm:num_requests_waiting") == 1)
        assert eventually(lambda: reading(narrow, "vllm:num_requests_waiting") == 0)
        assert reading(narrow, "vllm:num_requests_running") == 1
    assert_nothing_in_use(narrow)
