"""Rounds and what a draft device feeds, by hand."""

from __future__ import annotations

import pytest

from cluster.planning.round_costs import Drafting, plain_round, round_of
from cluster.planning.steps import MeasuredSteps
from cluster.speculation.speed import RoundCosts, speedup

_FLAT_TARGET = MeasuredSteps(((1, 0.015),))
_FLAT_DRAFT = MeasuredSteps(((1, 0.002),))


def test_a_round_has_the_published_speedup() -> None:
    # t_draft 2, t_verify 15, t_net 0.5 ms, a = 0.8, K = 5: 3.689 * 15 / (10 + 15 + 0.5) = 2.17
    drafting = Drafting(_FLAT_DRAFT, 0.8, round_trip_seconds=0.0005)
    own = round_of(_FLAT_TARGET, drafting, 1, 100, 5)
    assert own.seconds == pytest.approx(0.0255)
    assert own.num_tokens == pytest.approx(3.68928)
    plain = plain_round(_FLAT_TARGET, 1, 100)
    gain = (own.num_tokens / own.seconds) / (plain.num_tokens / plain.seconds)
    assert gain == pytest.approx(speedup(0.8, 5, RoundCosts(2, 15, 0.5)))


def test_verify_has_k_plus_1_rows_a_sequence() -> None:
    target = MeasuredSteps(((1, 0.001), (101, 0.101)))  # a millisecond a row
    own = round_of(target, Drafting(_FLAT_DRAFT, 0.5), 4, 100, 3)
    assert own.verify_seconds == pytest.approx(0.016)  # 4 sequences * (3 + 1) rows
    assert own.draft_seconds == pytest.approx(0.006)  # 3 steps of 2 ms
    assert own.seconds == pytest.approx(0.022)


def test_a_draft_device_feeds_targets_by_the_share_it_drafts() -> None:
    # 1 + (15 + 1) / (4 * 2) = 3
    own = round_of(_FLAT_TARGET, Drafting(_FLAT_DRAFT, 0.8, round_trip_seconds=0.001), 1, 100, 4)
    assert own.targets_fed == pytest.approx(3.0)


def test_run_ahead_hides_a_share_of_drafting_and_the_way() -> None:
    # 15 + 0.3 * (5 * 2 + 0.5) = 18.15; where drafting takes longer than that, it decides
    drafting = Drafting(_FLAT_DRAFT, 0.8, round_trip_seconds=0.0005, hidden_share=0.7)
    assert round_of(_FLAT_TARGET, drafting, 1, 100, 5).seconds == pytest.approx(0.01815)
    assert round_of(_FLAT_TARGET, drafting, 1, 100, 16).seconds == pytest.approx(0.032)


def test_a_draft_in_one_pass_takes_one_step_of_all_its_rows() -> None:
    draft = MeasuredSteps(((1, 0.002), (31, 0.005)))  # 0.1 ms a row
    own = round_of(_FLAT_TARGET, Drafting(draft, 0.8, is_one_pass=True), 4, 100, 3)
    assert own.draft_seconds == pytest.approx(0.0035)  # 4 * (3 + 1) rows
