"""The search finds the draft temperature that is accepted most often, and stays where nothing is better."""

from __future__ import annotations

import random

import pytest

from cluster.speculation.draft_temperature import DraftTemperature, factor_of


def search(optimum: int, num_rounds: int, seed: int = 0) -> DraftTemperature:
    """Acceptance falls by 5 points with every step from the optimum."""
    rng = random.Random(seed)
    found = DraftTemperature()
    for _ in range(num_rounds):
        exponent = found.next_exponent()
        rate = 0.75 - 0.05 * abs(exponent - optimum)
        found.observe(exponent, 16, sum(rng.random() < rate for _ in range(16)))
    return found


@pytest.mark.parametrize("optimum", [-3, 0, 4])
def test_it_finds_the_optimum(optimum: int) -> None:
    assert abs(search(optimum, 5000).best - optimum) <= 1


def test_it_stays_where_all_are_alike() -> None:
    """Each look at a difference of 2.6 standard errors may mislead it; it looks often, but at the same counts."""
    rng = random.Random(1)
    moved = 0
    for _ in range(40):
        found = DraftTemperature()
        for _ in range(400):
            exponent = found.next_exponent()
            found.observe(exponent, 16, sum(rng.random() < 0.7 for _ in range(16)))
        moved += found.best != 0
    assert moved <= 8


def test_it_keeps_to_its_range() -> None:
    assert search(8, 6000).best == 5
    assert 0.45 < factor_of(-5) < 0.55
    assert 1.9 < factor_of(5) < 2.1


def test_what_was_drafted_before_a_move_does_not_count() -> None:
    found = DraftTemperature()
    found.observe(3, 10_000, 10_000)
    assert found.best == 0
