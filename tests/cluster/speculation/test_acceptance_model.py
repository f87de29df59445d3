"""Acceptance is learned from what was confirmed, by position and by sequence."""

from __future__ import annotations

import itertools
import random

import pytest

from cluster.speculation.acceptance_model import PositionRates, SequenceAcceptance

DEPTH = 8


def rounds(rate: float, count: int, seed: int = 0, depth: int = DEPTH) -> list[tuple[int, int]]:
    """(drafts, accepted) of rounds in which every draft is confirmed with probability `rate`."""
    rng = random.Random(seed)
    results = []
    for _ in range(count):
        accepted = 0
        while accepted < depth and rng.random() < rate:
            accepted += 1
        results.append((depth, accepted))
    return results


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.9])
def test_rates_approach_the_truth(rate: float) -> None:
    shared = PositionRates(DEPTH)
    for drafts, accepted in rounds(rate, 400):
        shared.observe(drafts, accepted)
    # A window of 200 tests: a standard error of 0.036 at most; 4 of them.
    assert shared.rates[0] == pytest.approx(rate, abs=0.15)


def test_positions_differ() -> None:
    shared = PositionRates(DEPTH)
    for _ in range(200):
        shared.observe(4, 2)  # the first two always, the third never
    assert shared.rates[0] > 0.95
    assert shared.rates[1] > 0.95
    assert shared.rates[2] < 0.1


def test_an_untested_position_is_like_the_one_before() -> None:
    shared = PositionRates(DEPTH)
    for _ in range(200):
        shared.observe(1, 1)
    assert shared.rates[5] == pytest.approx(shared.rates[0])


def test_rates_follow_a_change() -> None:
    shared = PositionRates(DEPTH)
    for rate in (0.9, 0.3):
        for drafts, accepted in rounds(rate, 1000):
            shared.observe(drafts, accepted)
        assert shared.rates[0] == pytest.approx(rate, abs=0.15)
    assert shared.rates[0] == pytest.approx(0.3, abs=0.15)


def test_a_sequence_departs_from_the_others() -> None:
    shared = PositionRates(DEPTH)
    good, bad = SequenceAcceptance(shared), SequenceAcceptance(shared)
    for (drafts, many), (_, few) in zip(rounds(0.9, 60), rounds(0.3, 60, seed=1), strict=True):
        good.observe(drafts, many)
        bad.observe(drafts, few)
    assert bad.factor < 0.8 < 1.0 < good.factor
    assert bad.survival()[0] < 0.6 < good.survival()[0]


def test_survival_never_rises() -> None:
    sequence = SequenceAcceptance(PositionRates(DEPTH))
    for drafts, accepted in rounds(0.95, 100):
        sequence.observe(drafts, accepted)
    survival = sequence.survival()
    assert len(survival) == DEPTH
    assert all(a >= b > 0 for a, b in itertools.pairwise(survival))


def test_a_round_without_drafts_says_nothing() -> None:
    sequence = SequenceAcceptance(PositionRates(DEPTH))
    before = sequence.survival()
    sequence.observe(0, 0)
    assert sequence.survival() == before


def test_old_tests_can_be_made_to_count_for_less() -> None:
    shared = PositionRates(DEPTH)
    for _ in range(200):
        shared.observe(4, 0)
    before = shared.rates[0]
    shared.remember(20.0)
    for _ in range(20):
        shared.observe(4, 4)
    assert before < 0.05
    assert shared.rates[0] == pytest.approx(0.5, abs=0.05)


def test_drafts_deeper_than_what_is_kept_of_positions_count_as_far_as_that() -> None:
    deep, all_accepted = SequenceAcceptance(PositionRates(2)), SequenceAcceptance(PositionRates(2))
    deep.observe(5, 3)
    all_accepted.observe(2, 2)
    assert deep.survival() == all_accepted.survival()
