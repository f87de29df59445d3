"""Draft workers that die or freeze, and clients that leave, change nobody else's tokens."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import httpx
import pytest

from bench.workload import held_out_prompts, read_counters
from services.launch.local import LocalCluster
from tests.system.client import Case, assert_nothing_in_use, complete_all, eventually
from tests.system.conftest import READY_TIMEOUT_SECONDS
from tests.waiting import WAIT_S

NUM_REQUESTS = 24


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    fields = {"temperature": 0.8, "ignore_eos": True}
    prompts = held_out_prompts(NUM_REQUESTS, seed=3)
    return [Case(tuple(prompt), seed, 60, fields) for seed, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(two_of_each: LocalCluster, cases: list[Case]) -> list[list[int]]:
    return complete_all(two_of_each.url, cases, num_speculative_tokens=0)


def num_different(answers: list[list[int]], expected: list[list[int]]) -> int:
    return sum(answer != wanted for answer, wanted in zip(answers, expected, strict=True))


def disconnect_at_random(url: str, stop: threading.Event) -> None:
    """A client that starts streams and leaves them."""
    rng = random.Random(1)
    with httpx.Client(base_url=url, timeout=WAIT_S) as client:
        while not stop.is_set():
            body = {"prompt": [rng.randrange(3, 4000)], "max_tokens": 400, "stream": True, "ignore_eos": True}
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                for _ in range(rng.randrange(8)):
                    next(lines)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_draft_changes_no_token(
    two_of_each: LocalCluster, cases: list[Case], expected: list[list[int]], signum: signal.Signals
) -> None:
    victim = two_of_each.drafts[0].pid
    stop = threading.Event()
    clients = [
        threading.Thread(target=disconnect_at_random, args=(two_of_each.url, stop)),
        threading.Timer(1.0, os.kill, (victim, signum)),
    ]
    for client in clients:
        client.start()
    try:
        answers = complete_all(two_of_each.url, cases)
    finally:
        stop.set()
        for client in clients:
            client.join()
        if signum == signal.SIGSTOP:
            os.kill(victim, signal.SIGCONT)
    assert num_different(answers, expected) <= 1  # float32 has near-ties, rarely

    def is_whole() -> bool:
        """Where the victim is dead that is known only once it has been replaced: what the router knows may be older."""
        two_of_each.watch()
        return (signum == signal.SIGSTOP or two_of_each.drafts[0].pid != victim) and two_of_each.is_ready()

    assert eventually(is_whole, READY_TIMEOUT_SECONDS)
    assert_nothing_in_use(two_of_each)


def test_a_slow_draft_changes_no_token(two_of_each: LocalCluster, cases: list[Case], expected: list[list[int]]) -> None:
    """One that runs a third of the time: its proposals come late, and some are stale."""
    victim = two_of_each.drafts[0].pid
    stop = threading.Event()

    def hold_up() -> None:
        while not stop.is_set():
            os.kill(victim, signal.SIGSTOP)
            time.sleep(0.1)
            os.kill(victim, signal.SIGCONT)
            time.sleep(0.05)

    holding_up = threading.Thread(target=hold_up)
    holding_up.start()
    try:
        answers = complete_all(two_of_each.url, cases)
    finally:
        stop.set()
        holding_up.join()
    assert num_different(answers, expected) <= 1
    late = sum(read_counters(target.metrics_url)["outrider_late_rounds_total"] for target in two_of_each.targets)
    assert late > 0
    assert_nothing_in_use(two_of_each)
