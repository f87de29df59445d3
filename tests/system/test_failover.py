"""Targets that die, freeze or drain under streams: an unmodified client gets the same text, after a pause."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import OpenAI

from bench.workload import read_counters
from services.launch.local import LocalCluster, WorkerProcess
from tests.system.client import assert_nothing_in_use, eventually
from tests.system.conftest import READY_TIMEOUT_SECONDS, cluster_config
from tests.waiting import WAIT_S

# With every kind of state that has to go with a request. Long enough to be in the middle of it when the fault comes.
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "def main(", "temperature": 0.0},
    {"prompt": "class Stack:\n", "temperature": 0.9, "seed": 7, "n": 3},
    {"prompt": "import os\n", "temperature": 1.0, "seed": 1, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"prompt": "for i in", "temperature": 0.7, "seed": 2, "extra_body": {"repetition_penalty": 1.2, "top_k": 50}},
    {"prompt": "def test_", "temperature": 0.8, "seed": 3, "stop": ["\n\n\n", "assert False"]},
    {"prompt": "class Queue:", "temperature": 1.0, "seed": 4, "logit_bias": {"11": 1.5}, "top_p": 0.9},
    {
        "prompt": "records = ",
        "temperature": 1.0,
        "seed": 5,
        "logprobs": 2,
        "extra_body": {
            "guided_json": {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 40},
            "bad_words": ["self"],
        },
    },
]
MAX_TOKENS = 500


@pytest.fixture(scope="module")
def expected(two_of_each: LocalCluster) -> list[list[str]]:
    return ask_all(two_of_each, threading.Event())


def ask_all(cluster: LocalCluster, has_begun: threading.Event) -> list[list[str]]:
    """The text of every choice of every request, streamed all at once. `has_begun` when all have had some of it."""
    client = OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
    begun = threading.Barrier(len(REQUESTS), action=has_begun.set)

    def ask(request: dict[str, Any]) -> list[str]:
        texts = [""] * request.get("n", 1)
        fields = {"model": client.models.list().data[0].id, "max_tokens": MAX_TOKENS, "stream": True, **request}
        is_first = True
        for chunk in client.completions.create(**fields):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
            if is_first:
                is_first = False
                begun.wait(timeout=WAIT_S)
        return texts

    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        return list(threads.map(ask, REQUESTS))


def num_moved(cluster: LocalCluster, reason: str) -> float:
    for line in httpx.get(f"{cluster.url}/metrics").text.splitlines():
        if line.startswith("outrider_requests_moved_total") and f'reason="{reason}"' in line:
            return float(line.rpartition(" ")[2])
    return 0.0


def num_used_blocks(target: WorkerProcess) -> float:
    assert target.metrics_url is not None
    return read_counters(target.metrics_url)["outrider_kv_blocks_used"]


@pytest.mark.parametrize(
    ("signum", "reason"), [(signal.SIGKILL, "lost"), (signal.SIGSTOP, "lost"), (signal.SIGTERM, "draining")]
)
def test_a_client_gets_the_same_text(
    two_of_each: LocalCluster, expected: list[list[str]], signum: signal.Signals, reason: str
) -> None:
    victims: list[int] = []
    before = num_moved(two_of_each, reason)
    has_begun = threading.Event()

    def strike() -> None:
        assert has_begun.wait(WAIT_S)
        # The answers of one may be complete by now: a grammar takes a while before its request begins.
        busiest = max(two_of_each.targets, key=num_used_blocks)
        victims.append(busiest.pid)
        os.kill(busiest.pid, signum)

    striking = threading.Thread(target=strike)
    striking.start()
    try:
        texts = ask_all(two_of_each, has_begun)
    finally:
        striking.join()
        if signum == signal.SIGSTOP:
            os.kill(victims[0], signal.SIGCONT)
    assert texts == expected
    assert num_moved(two_of_each, reason) > before
    assert eventually(lambda: two_of_each.watch() is None and two_of_each.is_ready(), READY_TIMEOUT_SECONDS)
    assert_nothing_in_use(two_of_each)


def test_with_one_target_a_request_waits_for_its_restart() -> None:
    with LocalCluster(cluster_config("target.replicas=1", "draft.replicas=1")) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        expected = ask_all(cluster, threading.Event())
        has_begun, is_over = threading.Event(), threading.Event()

        def strike_and_watch() -> None:
            assert has_begun.wait(WAIT_S)
            os.kill(cluster.targets[0].pid, signal.SIGKILL)
            while not is_over.wait(0.1):
                cluster.watch()

        watching = threading.Thread(target=strike_and_watch)
        watching.start()
        try:
            assert ask_all(cluster, has_begun) == expected
        finally:
            is_over.set()
            watching.join()
        assert num_moved(cluster, "lost") >= len(REQUESTS)
