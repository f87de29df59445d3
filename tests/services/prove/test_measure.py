"""Measuring: who is asked what and when, what goes wrong, and what is cut off."""

from __future__ import annotations

import os
import signal
from itertools import groupby
from typing import Any

import pytest

from services.prove.limit import Stopped, TimeLimit
from services.prove.measure import Results, measure
from services.prove.systems import BESIDE, PLAIN, REMOTE, STOCK, Experiment
from tests.services.prove.experiments import SYSTEMS, experiment, result
from tests.services.prove.servers import StubSystem, by_seed

LONG = 60.0


def stubs(events: list[tuple[str, str]], **changes: Any) -> list[StubSystem]:
    return [StubSystem(name, events, **changes) for name in SYSTEMS]


def run(systems: list[StubSystem], own: Experiment, *, together: bool = True, seconds: float = LONG) -> Results:
    results = Results(own, [system.name for system in systems])
    with TimeLimit(seconds) as limit:
        measure(systems, results, limit, together=together)
    return results


def turns(events: list[tuple[str, str]]) -> list[str]:
    """Returns the system that each request went to, in order."""
    return [name for name, _ in groupby(name for kind, name in events if kind == "ask")]


def test_systems_that_run_together_answer_in_turn() -> None:
    events: list[tuple[str, str]] = []
    systems = stubs(events)
    results = run(systems, experiment())
    assert not results.missing
    assert [name for kind, name in events if kind == "start"] == list(SYSTEMS)
    forward, backward = list(SYSTEMS), list(SYSTEMS)[::-1]
    # The warm-up; then each number of streams by all of them, in the other direction in the second repeat.
    expected = [*forward, *forward, *forward, *backward, *backward]
    assert turns(events) == [name for name, _ in groupby(expected)]
    assert not any(system.is_running for system in systems)


def test_systems_that_do_not_fit_together_are_started_for_their_turn() -> None:
    events: list[tuple[str, str]] = []
    results = run(stubs(events), experiment(), together=False)
    assert not results.missing
    lifetimes = [(kind, name) for kind, name in events if kind in ("start", "stop")]
    order = [*SYSTEMS, *SYSTEMS[::-1]]
    assert lifetimes == [(kind, name) for name in order for kind in ("start", "stop")]


def test_all_systems_get_the_same_requests() -> None:
    asked: dict[str, list[tuple[Any, ...]]] = {}

    def noting(name: str) -> Any:
        def answer(body: dict[str, Any]) -> list[int]:
            told = (tuple(body["prompt"]), body["seed"], body["max_tokens"], body["temperature"], body["ignore_eos"])
            asked.setdefault(name, []).append(told)
            return by_seed(body)

        return answer

    run([StubSystem(name, [], noting(name)) for name in SYSTEMS], experiment())
    assert len({frozenset(told) for told in asked.values()}) == 1
    assert {len(told) for told in asked.values()} == {(1 + 2) + 2 * (2 + 4)}  # warm-up, then two repeats


def test_a_system_that_does_not_start_is_left_out() -> None:
    events: list[tuple[str, str]] = []
    systems = [StubSystem(name, events, fails=name == STOCK) for name in SYSTEMS]
    results = run(systems, experiment())
    assert results.problems == {STOCK: "it does not start"}
    assert {system for _, system, _ in results.missing} == {STOCK}
    assert len(results.missing) == 4


@pytest.mark.parametrize("together", [True, False])
def test_at_the_time_limit_what_there_is_is_kept_and_everything_ends(together: bool) -> None:
    events: list[tuple[str, str]] = []
    slow = StubSystem(REMOTE, events, token_seconds=1.0)  # longer than the limit
    systems = [StubSystem(PLAIN, events, token_seconds=0.0), slow]
    results = Results(experiment(has_peer=False), [system.name for system in systems])
    with TimeLimit(3.0) as limit, pytest.raises(Stopped, match="the time limit"):
        measure(systems, results, limit, together=together)
    assert {system for _, system, _ in results.missing} >= {REMOTE}
    assert not any(system.is_running for system in systems)
    if not together:
        assert {one.system for one in results.results} == {PLAIN}


def test_a_signal_waits_until_all_processes_of_a_system_are_started() -> None:
    events: list[tuple[str, str]] = []
    system = StubSystem(PLAIN, events, at_start=lambda: os.kill(os.getpid(), signal.SIGINT))
    results = Results(experiment(has_peer=False), [PLAIN])
    with TimeLimit(LONG) as limit, pytest.raises(Stopped, match="SIGINT"):
        measure([system], results, limit, together=True)
    assert events == [("start", PLAIN), ("stop", PLAIN)]


def test_answers_are_compared_by_their_prompt_and_seed() -> None:
    results = Results(experiment(), SYSTEMS)
    results.results = [
        result(0, STOCK, 10.0, token_ids=(9, 9, 9, 9, 9)),  # its noise is its own
        result(0, PLAIN, 10.0, token_ids=(1, 2, 3, 4, 5)),
        result(0, BESIDE, 10.0, token_ids=(1, 2, 3, 4, 5)),
        result(0, REMOTE, 10.0, token_ids=(1, 2, 3, 7, 8)),
        result(1, PLAIN, 10.0, num_streams=2, token_ids=(1, 2, 3, 4)),
    ]
    found = results.differences()
    assert STOCK not in found
    assert (found[BESIDE].num_different_answers, found[BESIDE].num_different_tokens) == (0, 0)
    assert (found[REMOTE].num_different_answers, found[REMOTE].num_different_tokens) == (1, 2)
    assert (found[PLAIN].num_answers, found[PLAIN].num_different_tokens) == (2, 1)


def test_rounds_follow_from_tokens_and_accepted_drafts() -> None:
    one = result(0, REMOTE, 10.0)  # five tokens, one of them the prompt's; four drafts, two accepted
    assert one.num_rounds == 2
    assert one.mean_k == 2.0
    assert one.acceptance_length == 2.0
    assert result(0, PLAIN, 10.0).acceptance_length == 1.0
    assert result(0, STOCK, 10.0).mean_k is None
