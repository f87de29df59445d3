"""Requests are measured against their limits."""

from __future__ import annotations

from cluster.config.file import load_config
from protos.speculation.v1 import target_pb2
from services.target.request_limits import RequestLimits


class Requests:
    """Requests to a target with limits of 100 ms and 20 ms, at times that the test sets."""

    def __init__(self, *settings: str) -> None:
        self.now = 0.0
        self.limits = RequestLimits(load_config(None, list(settings)), lambda: self.now)

    def answer(self, first_ms: float, token_ms: float, num_tokens: int = 33, **fields: object) -> None:
        self.limits.started("a", target_pb2.GenerateRequest(**fields))  # type: ignore[arg-type]
        self.now += first_ms / 1e3
        self.limits.committed("a", 1)
        for _ in range(num_tokens - 1):
            self.now += token_ms / 1e3
            self.limits.committed("a", 1)
        self.limits.ended("a")

    def within(self, limit: str) -> tuple[int, float]:
        """Returns the requests within `limit`, and all that have it."""
        found = {reading.labels["limit"]: reading for reading in self.limits.readings()}[limit]
        return dict(found.buckets)["1.0"], found.value


BOTH = ("target.first_token_ms=100", "speculation.output_token_ms=20")


def test_times_are_compared_with_the_limits() -> None:
    requests = Requests(*BOTH)
    requests.answer(first_ms=90, token_ms=19)
    requests.answer(first_ms=110, token_ms=19)
    requests.answer(first_ms=90, token_ms=21)
    assert requests.within("first_token_ms") == (2, 3)
    assert requests.within("output_token_ms") == (2, 3)


def test_a_request_may_have_a_limit_of_its_own() -> None:
    requests = Requests()
    requests.answer(first_ms=1, token_ms=19)
    assert requests.within("output_token_ms") == (0, 0)
    requests.answer(first_ms=1, token_ms=19, output_token_ms=20.0)
    requests.answer(first_ms=1, token_ms=19, output_token_ms=18.0)
    assert requests.within("output_token_ms") == (1, 2)


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
