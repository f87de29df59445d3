"""The same tokens of two targets on three drafts, with trees, branches and earlier text, and drafts in trouble."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from bench.workload import held_out_prompts
from services.launch.child import Child
from services.launch.local import LocalCluster
from tests.soak import length
from tests.system.client import Case, assert_nothing_in_use, complete_all
from tests.system.conftest import READY_TIMEOUT_SECONDS, cluster_config

NUM_REQUESTS = 24
SETTINGS = (
    "target.replicas=2",
    "draft.replicas=3",
    "speculation.tree_width=3",
    "speculation.max_run_ahead=20",
    "speculation.suffix_bytes=1000000",
)


@pytest.fixture(scope="module", params=length(["goodput"], ["goodput", "fixed"]))
def cluster_of_all(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with LocalCluster(cluster_config(*SETTINGS, f"speculation.controller={request.param}")) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        yield cluster


def send(victim: Child, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may have been killed a moment ago
        os.kill(victim.pid, signum)


def freeze(victim: Child, rng: random.Random) -> None:
    send(victim, signal.SIGSTOP)
    time.sleep(rng.uniform(0.05, 0.6))
    send(victim, signal.SIGCONT)


def slow_down(victim: Child, rng: random.Random) -> None:
    for _ in range(5):
        send(victim, signal.SIGSTOP)
        time.sleep(0.04)
        send(victim, signal.SIGCONT)
        time.sleep(0.02)


def kill(victim: Child, rng: random.Random) -> None:
    send(victim, signal.SIGKILL)


def test_the_same_tokens(cluster_of_all: LocalCluster) -> None:
    rng = random.Random(1)
    prompts = held_out_prompts(NUM_REQUESTS, seed=5)
    temperatures = (0.0, 0.7, 1.0)
    cases = [
        Case(tuple(prompt), seed, 60, {"temperature": temperatures[seed % 3], "ignore_eos": True})
        for seed, prompt in enumerate(prompts)
    ]
    expected = complete_all(cluster_of_all.url, cases, num_speculative_tokens=0)
    stop = threading.Event()

    def trouble() -> None:
        killed_at = 0.0
        while not stop.is_set():
            what = rng.choice([freeze, slow_down, kill])
            if what is kill and time.monotonic() < killed_at + 2.0:
                continue  # a restart takes a second, and somebody should be there to draft
            if what is kill:
                killed_at = time.monotonic()
            what(rng.choice(cluster_of_all.drafts), rng)
            cluster_of_all.watch()

    troubling = threading.Thread(target=trouble)
    troubling.start()
    try:
        answers = complete_all(cluster_of_all.url, cases)
    finally:
        stop.set()
        troubling.join()
    num_different = sum(answer != wanted for answer, wanted in zip(answers, expected, strict=True))
    assert num_different <= 1  # float32 has near-ties, rarely
    cluster_of_all.wait_ready(READY_TIMEOUT_SECONDS)
    assert_nothing_in_use(cluster_of_all)
