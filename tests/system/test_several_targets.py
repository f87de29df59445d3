"""Two targets and two drafts: load is spread, a dead target's requests go on at the other, nothing stays in use."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx

from bench.workload import read_counters
from services.launch.local import LocalCluster
from tests.soak import length
from tests.system.client import Case, assert_nothing_in_use, complete_all
from tests.system.conftest import READY_TIMEOUT_SECONDS
from tests.waiting import WAIT_S, eventually

NUM_STREAMS = 6
NUM_MIXED_REQUESTS = length(200, 500)


def test_nothing_stays_in_use_after_many_mixed_requests(two_of_each: LocalCluster) -> None:
    """Whole, streamed, with several choices, cancelled while waiting, in prefill and while decoding."""
    rng = random.Random(12)

    def request(number: int) -> None:
        body = {
            "prompt": [rng.randrange(3, 4000) for _ in range(rng.choice((1, 20, 300)))],
            "max_tokens": rng.choice((1, 4, 16)),
            "num_speculative_tokens": rng.choice((0, 1, 4, 8)),
            "temperature": rng.choice((0, 1)),
            "n": rng.choice((1, 1, 2)),
        }
        kind = number % 5
        if kind == 0:  # leaves after some chunks, perhaps before the first
            with client.stream("POST", "/v1/completions", json={**body, "max_tokens": 1000, "stream": True}) as reply:
                lines = reply.iter_lines()
                for _ in range(rng.randrange(6)):
                    next(lines, None)  # an answer may be over before
        elif kind == 1:  # leaves without waiting for the answer
            with contextlib.suppress(httpx.TimeoutException):
                client.post("/v1/completions", json={**body, "max_tokens": 1000}, timeout=rng.choice((0.01, 0.2)))
        else:
            assert client.post("/v1/completions", json={**body, "stream": kind == 2}).status_code == 200

    with httpx.Client(base_url=two_of_each.url, timeout=WAIT_S) as client, ThreadPoolExecutor(12) as threads:
        list(threads.map(request, range(NUM_MIXED_REQUESTS)))
    assert_nothing_in_use(two_of_each)


def test_a_dead_targets_requests_go_on_elsewhere_with_the_same_tokens(two_of_each: LocalCluster) -> None:
    cases = [
        Case((400, 20, 7, seed), seed, 600, {"temperature": 1.0, "ignore_eos": True}) for seed in range(NUM_STREAMS)
    ]
    all_started = threading.Barrier(NUM_STREAMS + 1, timeout=WAIT_S)

    def follow(case: Case) -> list[int]:
        """The tokens that came."""
        body = {"prompt": list(case.prompt), "seed": case.seed, "max_tokens": case.max_tokens, **case.fields}
        token_ids: list[int] = []
        with client.stream("POST", "/v1/completions", json={**body, "stream": True, "return_token_ids": True}) as reply:
            for line in reply.iter_lines():
                if line in ("", "data: [DONE]"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event
                if not token_ids:
                    all_started.wait()
                token_ids.extend(event["choices"][0]["token_ids"])
        return token_ids

    with httpx.Client(base_url=two_of_each.url, timeout=WAIT_S) as client, ThreadPoolExecutor(NUM_STREAMS) as threads:
        streams = [threads.submit(follow, case) for case in cases]
        all_started.wait()
        running = [read_counters(target.metrics_url)["vllm:num_requests_running"] for target in two_of_each.targets]
        os.kill(two_of_each.targets[0].pid, signal.SIGKILL)
        answers = [stream.result() for stream in streams]
    assert all(running)  # how evenly depends on what the balancer had last heard
    assert sum(running) == NUM_STREAMS
    assert eventually(lambda: two_of_each.watch() is None and two_of_each.is_ready(), READY_TIMEOUT_SECONDS)
    assert answers == complete_all(two_of_each.url, cases)
    assert_nothing_in_use(two_of_each)
