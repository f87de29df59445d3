"""Predicted tokens per second are compared with measured ones."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.speculation.realised_gain import RealisedGain


def after(share: float, gain: float = 2.0, number: int = 600) -> RealisedGain:
    realised = RealisedGain()
    for _ in range(number):
        realised.observe_share(share)
        realised.observe_gain(gain)
    return realised


@pytest.mark.parametrize("share", [0.7, 1.0, 1.2])
def test_averages_approach_what_is_observed(share: float) -> None:
    realised = after(share, gain=1.8)
    assert realised.share == pytest.approx(share, abs=0.01)
    assert realised.gain == pytest.approx(1.8, abs=0.01)


def test_steps_that_scatter_by_a_tenth_waver_by_less_than_two_percent() -> None:
    rng = np.random.default_rng(0)
    realised, shares = after(1.0), []
    for _ in range(20_000):
        realised.observe_share(float(rng.normal(1.0, 0.1)))
        shares.append(realised.share)
    assert np.std(shares) < 0.02


def test_sixty_four_steps_are_two_thirds_of_the_average() -> None:
    realised = after(0.5, number=64)
    assert realised.share == pytest.approx(1.0 - 0.5 * 2 / 3, abs=0.05)


def test_one_absurd_step_is_bounded() -> None:
    realised = after(1.0)
    realised.observe_share(1000.0)
    assert realised.share <= 1.5


def test_probes_forget_the_difference() -> None:
    realised = after(0.7)
    realised.forget()
    assert realised.share == pytest.approx(0.7, abs=0.05)
    assert realised.gain == 1.0
    for _ in range(50):
        realised.forget()
    assert realised.share == pytest.approx(1.0, abs=0.01)
