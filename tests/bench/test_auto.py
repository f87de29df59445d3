"""The controller's k is near the best fixed k, from the first answers on, whatever a step takes."""

from __future__ import annotations

import statistics

import pytest

from bench.auto import CASES, COLD_BAR, FLOOR_BAR, WARM_BAR, Case, run
from tests.soak import length

SEEDS = range(length(3, 6))
NUM_STREAMS = 4


@pytest.mark.parametrize("case", CASES[: length(1, 3)], ids=lambda case: case.name)
def test_it_is_near_the_best_fixed_depth(case: Case) -> None:
    rates = {k: [run(case, NUM_STREAMS, k, seed) for seed in SEEDS] for k in (None, 0, *length((3,), (2, 3, 4)))}
    for part, bar in enumerate((COLD_BAR, WARM_BAR)):
        medians = {k: statistics.median(rate[part] for rate in found) for k, found in rates.items()}
        auto = medians.pop(None)
        assert auto >= bar * max(medians.values())
        assert auto >= FLOOR_BAR * medians[0]
