"""A pool pays, and less than its bound."""

from __future__ import annotations

from bench.pool import Case, measure
from tests.soak import length


def test_drafts_of_another_gpu_pay_less_than_if_they_were_hidden_as_a_whole() -> None:
    cell = measure(Case("1B-int4", "A10G", 0.5, targets=1, streams=2, acceptance=0.8), seconds=length(14.0, 20.0))
    assert 1.5 < cell.gain < cell.bound
    assert 0.0 < cell.draft_busy <= 1.0
    assert 0.0 <= cell.waiting_share < 0.6
    assert cell.p99_between_ms is not None
    assert cell.p99_between_k0_ms is not None
    assert cell.p99_between_ms < cell.p99_between_k0_ms


def test_a_draft_that_is_never_right_gives_nothing() -> None:
    case = Case("1B", "A10G", 0.5, targets=1, streams=4, acceptance=0.0)
    assert case.bound <= 1.0
    assert measure(case, seconds=6.0).gain > 0.9
