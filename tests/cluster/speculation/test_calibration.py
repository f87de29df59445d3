"""Promises are held against what came of them."""

from __future__ import annotations

import pytest

from cluster.speculation.calibration import Calibration, Promise


class Steps:
    def __init__(self) -> None:
        self.calibration = Calibration()

    def run(self, share: float, *, has_drafts: bool, number: int = 600) -> float:
        """Steps of 20 ms that are promised 10 tokens, of which `share` come. The handicap after."""
        for _ in range(number):
            self.calibration.observe(Promise(has_drafts, 10.0, 0.02), round(10 * share), 0.02)
        return self.calibration.handicap


def test_promises_that_are_kept_weigh_nothing() -> None:
    assert Steps().run(1.0, has_drafts=True) == pytest.approx(1.0, abs=0.01)


def test_drafts_that_bring_less_must_promise_more() -> None:
    assert Steps().run(0.8, has_drafts=True) == pytest.approx(1.25, abs=0.02)


def test_steps_that_take_longer_bring_less() -> None:
    calibration = Calibration()
    for _ in range(600):
        calibration.observe(Promise(True, 10.0, 0.02), 10, 0.025)
    assert calibration.handicap == pytest.approx(1.25, abs=0.02)


def test_what_holds_back_both_alike_weighs_nothing() -> None:
    steps = Steps()
    for _ in range(40):
        steps.run(0.8, has_drafts=False, number=16)
        handicap = steps.run(0.8, has_drafts=True, number=16)
    assert handicap == pytest.approx(1.0, abs=0.05)


def test_few_tokens_in_a_step_of_few_sequences_are_no_broken_promise() -> None:
    """Sequences come and go: what is promised is what those of the step were planned to have."""
    calibration = Calibration()
    for step in range(600):
        num_sequences = 1 + step % 4
        calibration.observe(Promise(True, 3.0 * num_sequences, 0.02), 3 * num_sequences, 0.02)
    assert calibration.handicap == pytest.approx(1.0)


def test_it_is_forgotten_when_it_is_not_tried() -> None:
    steps = Steps()
    before = steps.run(0.7, has_drafts=True)
    after = steps.run(1.0, has_drafts=False, number=3000)
    assert after < 1.0 + 0.3 * (before - 1.0)


def test_one_bad_step_says_little() -> None:
    steps = Steps()
    steps.run(0.0, has_drafts=True, number=1)
    assert steps.run(1.0, has_drafts=False, number=1) < 1.02
