"""Requests are measured against their limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cluster.config.file import load_config
from cluster.errors import OverloadedError
from protos.speculation.v1 import target_pb2
from services.target.request_limits import RequestLimits


class Requests:
    """Requests to a target with limits of 100 ms and 20 ms, at times that the test sets."""

    def __init__(self, *settings: str) -> None:
        self.now = 0.0
        self.limits = RequestLimits(load_config(None, list(settings)), lambda: self.now)

    def answer(self, first_ms: float, token_ms: float, num_tokens: int = 33, **fields: Any) -> None:
        self.arrives(**fields)
        self.now += first_ms / 1e3
        self.limits.committed("a", 1)
        for _ in range(num_tokens - 1):
            self.now += token_ms / 1e3
            self.limits.committed("a", 1)
        self.limits.ended("a")

    def arrives(self, num_waiting_tokens: int = 1, num_running: int = 1, **fields: Any) -> None:
        request = target_pb2.GenerateRequest(**fields)
        self.limits.started("a", request, num_waiting_tokens, num_running)

    def within(self, limit: str) -> tuple[int, float]:
        """Returns the requests within `limit`, and all that have it."""
        found = {one.labels["limit"]: one for one in self.limits.readings() if one.name == "outrider_limit_ratio"}[
            limit
        ]
        return dict(found.buckets)["1.0"], found.value


BOTH = ("target.first_token_ms=100", "speculation.output_token_ms=20")


def test_times_are_compared_with_the_limits() -> None:
    requests = Requests(*BOTH)
    requests.answer(first_ms=90, token_ms=19)
    requests.answer(first_ms=110, token_ms=19)
    requests.answer(first_ms=90, token_ms=21)
    assert requests.within("first_token_ms") == (2, 3)
    assert requests.within("output_token_ms") == (2, 3)
    assert (requests.limits.num_limited, requests.limits.num_late) == (3, 2)


def test_a_request_may_have_a_limit_of_its_own() -> None:
    requests = Requests()
    requests.answer(first_ms=1, token_ms=19)
    assert requests.within("output_token_ms") == (0, 0)
    requests.answer(first_ms=1, token_ms=19, output_token_ms=20.0)
    requests.answer(first_ms=1, token_ms=19, output_token_ms=18.0)
    assert requests.within("output_token_ms") == (1, 2)
    assert requests.limits.num_limited == 0, "a pool would grow by what a client asks for"


def test_short_answers_have_no_time_per_token() -> None:
    requests = Requests(*BOTH)
    requests.answer(first_ms=1, token_ms=100, num_tokens=31)
    requests.answer(first_ms=1, token_ms=100, num_tokens=1)
    assert requests.within("output_token_ms") == (0, 0)
    assert requests.within("first_token_ms") == (2, 2)


def test_a_request_that_another_target_began_has_no_first_token_here() -> None:
    requests = Requests(*BOTH)
    requests.answer(first_ms=500, token_ms=1, num_generated_tokens=4)
    assert requests.within("first_token_ms") == (0, 0)
    assert requests.within("output_token_ms") == (1, 1)


def busy(*settings: str) -> Requests:
    """Returns requests after 400: 1 ms to the first token per 256 waiting tokens, 1 ms an output token per request."""
    requests = Requests(*BOTH, *settings)
    for number in range(400):
        waiting, num_running = 10 + number % 50, 1 + number % 10
        requests.answer(waiting, num_running, num_waiting_tokens=256 * waiting, num_running=num_running)
    return requests


REFUSES = "target.refuse_late=true"


def test_a_request_that_would_miss_a_limit_is_refused() -> None:
    requests = busy(REFUSES)
    requests.arrives(num_waiting_tokens=256 * 95, num_running=18)
    with pytest.raises(OverloadedError, match=r"the first token would come after 0\.11\d* s, of 0\.1 s"):
        requests.arrives(num_waiting_tokens=256 * 110, num_running=2)
    with pytest.raises(OverloadedError, match=r"an output token would take 0\.022. s, of 0\.02 s"):
        requests.arrives(num_waiting_tokens=10, num_running=22)
    requests.arrives(num_waiting_tokens=10, num_running=22, output_token_ms=30.0)  # its own limit
    requests.arrives(num_waiting_tokens=10, num_running=22, choice_index=1)  # its first choice was accepted
    refused = {one.labels["limit"]: one.value for one in requests.limits.readings() if "refusals" in one.name}
    assert refused == {"first_token_ms": 1, "output_token_ms": 1}
    assert requests.limits.num_late == 2


def test_a_lone_request_is_accepted_and_so_is_one_that_another_target_began() -> None:
    requests = busy(REFUSES)
    requests.arrives(num_waiting_tokens=256_000, num_running=1)
    requests.arrives(num_waiting_tokens=256_000, num_running=30, num_generated_tokens=3)


def test_times_that_vary_need_a_margin() -> None:
    requests = Requests(*BOTH, REFUSES)
    for number in range(100):
        requests.answer(first_ms=60 + 40 * (number % 2), token_ms=1, num_waiting_tokens=100)
    requests.arrives()
    with pytest.raises(OverloadedError, match=r"after 0\.12"):  # 80 ms and 2.3 deviations of 20 ms
        requests.arrives(num_waiting_tokens=100, num_running=2)


def test_requests_with_their_own_limit_or_k_do_not_make_others_be_refused() -> None:
    requests = busy(REFUSES)
    for fields in ({"output_token_ms": 1e6}, {"num_speculative_tokens": 0}):
        for _ in range(200):
            requests.answer(first_ms=20, token_ms=100, num_waiting_tokens=20, **fields)
    requests.arrives(num_waiting_tokens=10, num_running=18)


@pytest.mark.parametrize("num_slow", [8, 32])
def test_a_cold_start_is_forgotten(num_slow: int) -> None:
    requests = Requests(*BOTH, REFUSES)
    for number in range(num_slow):
        requests.answer(first_ms=5000, token_ms=1, num_waiting_tokens=256 * (1 + number))
    num_accepted = 0
    for _ in range(1000):
        requests.now += 0.02
        try:
            requests.arrives(num_waiting_tokens=512, num_running=2)
        except OverloadedError:
            continue
        requests.answer(first_ms=10, token_ms=1, num_waiting_tokens=512)
        num_accepted += 1
    assert num_accepted > 800


def test_many_equal_loads_say_nothing_of_others() -> None:
    requests, rng = Requests(*BOTH, REFUSES), np.random.default_rng(0)
    for _ in range(200):
        tokens = int(rng.integers(256, 4096))
        requests.answer(first_ms=tokens / 100 + rng.random(), token_ms=1, num_waiting_tokens=tokens)
    for _ in range(8000):
        requests.answer(first_ms=2 + rng.random(), token_ms=1, num_waiting_tokens=256)
        requests.arrives(num_waiting_tokens=512, num_running=2)


def test_nothing_is_refused_before_some_measurements_or_without_the_setting() -> None:
    requests = Requests(*BOTH, REFUSES)
    requests.answer(first_ms=500, token_ms=50, num_running=2)
    requests.arrives(num_waiting_tokens=10_000, num_running=100)
    busy().arrives(num_waiting_tokens=10_000, num_running=100)
