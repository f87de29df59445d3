"""The controller keeps limits of the time per output token."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from cluster.speculation.answer_time import seconds_per_token_p99, token_moments
from cluster.speculation.depth import Candidate, Choice, NextStep
from cluster.speculation.output_limits import OutputLimits
from cluster.speculation.tuning import MAX_CLASSES
from tests.cluster.speculation.test_depth import acceptance, candidates, curve, goodput

ROWS_COST = {1: 0.020, 8: 0.022, 16: 0.026, 32: 0.034, 64: 0.050, 128: 0.082, 256: 0.146}
NUM_TOKENS = 64.0


def choice(own: list[Candidate], *, others: list[float] | None = None) -> Choice:
    num_rows = len(own) + len(others or [])
    return goodput(ROWS_COST).choose(NextStep(own, num_rows, other_limits=others or (), answer_tokens=NUM_TOKENS))


def limited(own: list[Candidate], seconds: float) -> list[Candidate]:
    return [replace(candidate, output_limit=seconds) for candidate in own]


def test_a_limit_that_is_kept_changes_nothing() -> None:
    own = candidates(0.8, 16)
    free = choice(own)
    assert max(free.num_drafts) > 0
    kept = choice(limited(own, 1.0))
    assert (kept.num_drafts, kept.excess) == (free.num_drafts, 1.0)
    assert math.isinf(free.spare_seconds)
    assert 0.5 < kept.spare_seconds < 4.0  # of rounds of a few tokens, a second each


@pytest.mark.parametrize("seconds", [0.040, 0.026, 0.022, 0.018, 0.014])
def test_of_the_depths_that_keep_a_limit_the_fastest_is_chosen(seconds: float) -> None:
    own, survival = candidates(0.8, 24), acceptance(0.8).survival()
    found = choice(limited(own, seconds))
    rates = []
    for depth in range(len(survival) + 1):
        moments = token_moments(survival[:depth])
        rows, batch, costs = np.array([24 * (1 + depth)]), np.array([24]), own[0].costs
        assert costs is not None
        step = float((curve(ROWS_COST).at(rows) + costs.wait_seconds(np.array([depth]), batch))[0])
        if seconds_per_token_p99(*moments, NUM_TOKENS, step, 0.0) <= seconds:
            rates.append(24 * moments[0] / step)
    assert (found.excess == 1.0) >= bool(rates)
    assert found.tokens_per_second >= 0.99 * max(rates, default=0.0)


def test_without_a_depth_that_keeps_it_the_closest_is_chosen() -> None:
    found = choice(limited(candidates(0.8, 24), 0.011))
    assert found.excess > 1.1
    assert found.spare_seconds < 0.0
    assert min(found.num_drafts) > 0  # drafts bring 30 ms nearer to 11 ms


def test_a_limit_that_no_drafts_could_keep_changes_nothing() -> None:
    """Otherwise a client with such a limit would take the drafts of all others."""
    one, own = candidates(0.8, 1), candidates(0.8, 24)
    free = choice([*one, *own])
    hopeless = choice([*limited(one, 1e-6), *own])
    assert (hopeless.num_drafts, hopeless.excess, hopeless.spare_seconds) == (free.num_drafts, 1.0, math.inf)


def test_drafts_of_others_do_not_break_a_limit() -> None:
    """Batch jobs would get drafts for their own sake, and each of their rows lengthens the step of the chats."""
    chats, batch = candidates(0.8, 4), candidates(0.8, 40)
    free = choice([*chats, *batch])
    assert sum(free.num_drafts[4:]) > 0
    step = sum([44, *free.num_drafts])
    assert step > 100
    both = choice([*limited(chats, 0.020), *batch])
    assert both.excess == 1.0
    assert sum(both.num_drafts[4:]) < sum(free.num_drafts[4:])
    assert min(both.num_drafts[:4]) >= max(both.num_drafts[4:])


@pytest.mark.parametrize("seconds", [0.026, 0.023, 0.020])
def test_others_get_the_drafts_that_a_limit_leaves_them(seconds: float) -> None:
    """Some of the batch jobs get a draft, where drafts for all would break the limit of the chats."""
    survival, times = acceptance(0.8).survival(), curve(ROWS_COST)
    best = 0.0
    for depth in range(len(survival) + 1):
        moments = token_moments(survival[:depth])
        for num_drafts in range(41):
            step = float(times.at(np.array([44 + 4 * depth + num_drafts]))[0])
            if seconds_per_token_p99(*moments, NUM_TOKENS, step, 0.0) <= seconds:
                best = max(best, (4 * moments[0] + 40 + 0.8 * num_drafts) / step)
    unlinked = [
        replace(candidate, costs=None) for candidate in [*limited(candidates(0.8, 4), seconds), *candidates(0.8, 40)]
    ]
    found = choice(unlinked)
    assert found.excess == 1.0
    assert sum(found.num_drafts[4:]) % 40 > 0
    assert found.tokens_per_second >= 0.99 * best


def test_sequences_without_drafts_have_limits() -> None:
    own = candidates(0.8, 24)
    assert sum(choice(own, others=[math.inf] * 8).num_drafts) > 0
    held_back = choice(own, others=[0.0345] * 8)
    assert sum(held_back.num_drafts) < sum(choice(own).num_drafts)
    assert held_back.excess == 1.0


def test_only_a_few_classes_are_distinguished() -> None:
    limits = [0.010 * (1 + place) for place in range(20)]
    found = OutputLimits([*limits, math.inf], [], NUM_TOKENS)
    assert found.class_of.tolist() == [
        *range(MAX_CLASSES - 1),
        *[MAX_CLASSES - 1] * (20 - MAX_CLASSES + 1),
        MAX_CLASSES,
    ]
    assert found.turns == [None, *range(MAX_CLASSES)]
    assert OutputLimits([math.inf] * 3, [], NUM_TOKENS).turns == [None]
