"""vLLM's engine core with our schedulers in virtual time: how long the device idles."""

from __future__ import annotations

import pytest

from bench.vllm_idle import PREPARE, RETURN, SCHEDULE, UPDATE, Case, Figures, run

SECONDS = 3.0


@pytest.fixture(scope="module", autouse=True)
def _environment(own_environment: None) -> None:
    """vLLM changes os.environ."""


def figures(target: str, draft: str, streams: int, *, is_async: bool) -> Figures:
    return run(Case(target, draft, streams, is_async), SECONDS)


@pytest.mark.parametrize("target", ["8B", "70B"])
def test_a_step_without_drafts_waits_for_no_host(target: str) -> None:
    found = figures(target, "", 16, is_async=True)
    assert found.other_ms < 0.01
    assert found.waited_ms == found.drafts == 0.0


def test_a_step_with_drafts_waits_for_the_output_before_it_at_most() -> None:
    found = figures("70B", "0.5B", 4, is_async=True)
    assert found.drafts > 3.0
    assert found.other_ms <= 1e3 * (RETURN + UPDATE) + 0.01


def test_synchronous_steps_wait_for_all_work_of_the_host() -> None:
    found = figures("8B", "", 4, is_async=False)
    assert found.other_ms == pytest.approx(1e3 * (SCHEDULE + PREPARE + RETURN + UPDATE))


def test_the_scheduler_waits_for_drafts_that_are_worth_it() -> None:
    """One stream: drafting takes part of a step, so not waiting would lose drafts."""
    found = figures("70B", "1B", 1, is_async=True)
    assert found.waited_ms > 0.1
    assert found.tokens_per_second > 2.0 * figures("70B", "", 1, is_async=True).tokens_per_second


@pytest.mark.parametrize(("target", "draft"), [("70B", "0.5B"), ("8B", "0.5B")])
def test_rows_are_not_reserved_for_drafts_that_do_not_come(target: str, draft: str) -> None:
    """At 64 streams the drafter has a draft for about half of the sequences; a row for each would halve the speed."""
    found, plain = (figures(target, each, 64, is_async=True) for each in (draft, ""))
    assert found.drafts > 0.3
    assert found.tokens_per_second > plain.tokens_per_second


def test_drafts_go_on_where_they_pay_a_little() -> None:
    """Probes get rows even if few drafts came before."""
    assert figures("8B", "1B", 4, is_async=True).drafts > 0.1
