"""Tests that vLLM's answers do not depend on drafts, token for token, and equal those of our own engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from services.launch.local import LocalCluster
from tests.soak import IS_SOAK, length
from tests.system.client import Case, complete_all
from tests.system.near_ties import NearTieJudge
from tests.system.vllm.programs import Programs
from tests.waiting import eventually

MAX_NEAR_TIES = 1  # of the 40 answers of a comparison: float32 has them, rarely


@pytest.fixture(scope="module")
def plain_answers(programs: Programs, cases: list[Case]) -> list[list[int]]:
    """Without speculation."""
    programs.use()
    return complete_all(programs.url, cases, num_speculative_tokens=0)


def num_different(cases: list[Case], answers: list[list[int]], expected: list[list[int]], judge: NearTieJudge) -> int:
    """Answers that differ, each shown to be a near-tie."""
    different = [i for i, answer in enumerate(answers) if answer != expected[i]]
    for i in different:
        assert judge.is_near_tie(cases[i], expected[i], answers[i]), (
            f"case {i} ({cases[i].fields}) differs and is no near-tie:\n{expected[i]}\n{answers[i]}"
        )
    print(f"{len(different)} near-ties in {len(answers)} answers of {sum(map(len, answers))} tokens")
    return len(different)


def drafted(programs: Programs) -> tuple[float, float]:
    """Drafted and accepted, over all answers so far."""
    page = httpx.get(f"{programs.url}/metrics").text
    values = dict(line.rpartition(" ")[::2] for line in page.splitlines() if not line.startswith("#"))

    def total(name: str) -> float:
        return sum(float(value) for key, value in values.items() if key.startswith(name))

    return total("vllm:spec_decode_num_draft_tokens_total"), total("vllm:spec_decode_num_accepted_tokens_total")


def num_moved(programs: Programs) -> float:
    page = httpx.get(f"{programs.url}/metrics").text
    moved = (line for line in page.splitlines() if line.startswith("outrider_requests_moved_total"))
    return sum(float(line.rpartition(" ")[2]) for line in moved)


def children_of(pid: int) -> list[int]:
    """All processes under it."""
    of_threads = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for file in of_threads for child in file.read_text().split()]
    return children + [grandchild for child in children for grandchild in children_of(child)]


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def answers_through(programs: Programs, cases: list[Case], fault: Callable[[], None]) -> list[list[int]]:
    """Returns the answers at k = 4; `fault` is called while every target is answering.

    The answers take a few seconds, and a target may have none whenever it is looked at. Then the cases are sent again.
    """
    with ThreadPoolExecutor(1) as threads:
        for _ in range(10):
            assert eventually(lambda: not any(programs.num_running()))
            answering = threads.submit(complete_all, programs.url, cases, num_speculative_tokens=4)
            assert eventually(lambda running=answering: running.done() or all(programs.num_running()))
            if not answering.done():
                fault()  # in this thread: what it starts would end with another
                return answering.result()
    pytest.fail("never were all targets answering")


@pytest.mark.parametrize("k", [1, 4, 16, None])
def test_same_tokens_with_the_right_draft(
    programs: Programs, cases: list[Case], plain_answers: list[list[int]], judge: NearTieJudge, k: int | None
) -> None:
    programs.use("right")
    before = drafted(programs)
    chosen = {} if k is None else {"num_speculative_tokens": k}
    answers = complete_all(programs.url, cases, **chosen)
    assert num_different(cases, answers, plain_answers, judge) <= MAX_NEAR_TIES
    num_drafted, num_accepted = (now - then for now, then in zip(drafted(programs), before, strict=True))
    if k is not None:  # else what pays decides
        assert 0.1 * num_drafted < num_accepted < num_drafted


@pytest.mark.parametrize("k", [4, None])
def test_same_tokens_with_a_random_draft(
    programs: Programs, cases: list[Case], plain_answers: list[list[int]], judge: NearTieJudge, k: int | None
) -> None:
    programs.use("random")
    before = drafted(programs)
    chosen = {} if k is None else {"num_speculative_tokens": k}
    answers = complete_all(programs.url, cases, **chosen)
    assert num_different(cases, answers, plain_answers, judge) <= MAX_NEAR_TIES
    num_drafted, num_accepted = (now - then for now, then in zip(drafted(programs), before, strict=True))
    if k is not None:
        assert num_accepted < 0.1 * num_drafted


def test_same_tokens_when_the_draft_is_killed_and_when_the_pool_is_restarted(
    programs: Programs, cases: list[Case], plain_answers: list[list[int]], judge: NearTieJudge
) -> None:
    programs.use("right", "random")

    def kill() -> None:
        os.kill(programs.drafts["right"].pid, signal.SIGKILL)

    def restart() -> None:
        programs.restart("random")
        programs.restart("right")

    for fault in (kill, restart):
        answers = answers_through(programs, cases, fault)
        assert num_different(cases, answers, plain_answers, judge) <= MAX_NEAR_TIES
    programs.use("right", "random")  # both are back


@pytest.mark.parametrize("signum", length([signal.SIGTERM], [signal.SIGKILL, signal.SIGTERM]))
def test_same_tokens_when_a_target_dies_and_when_it_drains(
    programs: Programs,
    cases: list[Case],
    plain_answers: list[list[int]],
    judge: NearTieJudge,
    signum: signal.Signals,
) -> None:
    """Its requests continue on the other target with equal tokens. The short form kills one in test_lora.py."""
    programs.use("right")
    victim = programs.targets["first"].pid
    processes = [victim, *children_of(victim)]
    before = num_moved(programs)
    try:
        # Twice, because the last ones may end before the target does.
        twice = [*cases, *cases]
        answers = answers_through(programs, twice, lambda: os.kill(victim, signum))
        assert num_different(twice, answers, [*plain_answers, *plain_answers], judge) <= MAX_NEAR_TIES
        assert num_moved(programs) > before
        assert eventually(lambda: not any(is_running(pid) for pid in processes)), "processes of the engine are left"
    finally:
        if IS_SOAK:
            programs.restart("first")
        else:  # later tests can use the other target, and starting an engine takes half a minute
            programs.remove_target("first")
    programs.use("right")
    programs.assert_nothing_in_use()


def test_same_tokens_as_our_own_engine(
    programs: Programs, cluster: LocalCluster, cases: list[Case], plain_answers: list[list[int]], judge: NearTieJudge
) -> None:
    ours = complete_all(cluster.url, cases, num_speculative_tokens=0)
    assert num_different(cases, ours, plain_answers, judge) <= 2
