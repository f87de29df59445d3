"""Draft workers that answer garbage, or nothing: vLLM goes on with the same tokens, and the metrics say why."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from cluster.config import Config
from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer
from services.launch.child import Child
from services.launch.local import free_ports
from tests.soak import length
from tests.system.client import Case, complete_all
from tests.system.near_ties import NearTieJudge
from tests.system.vllm.programs import Programs
from tests.system.vllm.test_exactness import MAX_NEAR_TIES, num_different

NUM_MIXED = length(150, 500)
NUM_AT_ONCE = 24


@pytest.mark.parametrize(
    ("kind", "metric"),
    [("garbage", 'outrider_proposals_dropped_total{reason="vocabulary"}'), ("silent", "outrider_late_rounds_total")],
)
def test_wrong_drafts(programs: Programs, cases: list[Case], judge: NearTieJudge, kind: str, metric: str) -> None:
    programs.use()
    few = cases[:10]
    expected = complete_all(programs.url, few, num_speculative_tokens=0)
    fingerprint = Tokenizer(resolve_model_folder(Config().target.model)).fingerprint()
    address = f"127.0.0.1:{free_ports(1)[0]}"
    child = Child(kind, [address, fingerprint, kind], module="tests.system.vllm.wrong_draft")
    child.start()
    programs.draft_addresses[kind] = address
    try:
        before = total(programs, metric)
        programs.use(kind)
        answers = complete_all(programs.url, few, num_speculative_tokens=4)
        assert num_different(few, answers, expected, judge) <= MAX_NEAR_TIES
        assert total(programs, metric) > before
    finally:
        child.kill()
    programs.use()


def total(programs: Programs, metric: str) -> float:
    return sum(programs.counters(name).get(metric, 0.0) for name in programs.targets)


def test_nothing_is_left_after_many_mixed_requests_of_which_some_are_cancelled(programs: Programs) -> None:
    programs.use("right")
    rng = random.Random(3)
    wanted = [(rng.random() < 0.4, rng.randrange(1, 40), rng.choice((0, 3, 8, "auto"))) for _ in range(NUM_MIXED)]

    def ask(is_left: bool, max_tokens: int, k: int | str) -> bool:
        """Sends a request. Returns whether it was answered to the end."""
        prompt = [300 + max_tokens] * (1 + 7 * max_tokens)
        body = {"prompt": prompt, "max_tokens": max_tokens, "num_speculative_tokens": k, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            if is_left:
                next(lines)
                return False
            return list(lines)[-2:] == ["data: [DONE]", ""]

    with httpx.Client(base_url=programs.url, timeout=300) as client, ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        answered = list(threads.map(ask, *zip(*wanted, strict=True)))
    assert answered == [not is_left for is_left, *_ in wanted]
    programs.assert_nothing_in_use()
