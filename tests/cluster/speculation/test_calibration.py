"""Promises are held against what came of them."""

from __future__ import annotations

import pytest

from cluster.speculation.calibration import Calibration


class Windows:
    def __init__(self) -> None:
        self.calibration = Calibration()
        self.now = 0.0

    def run(self, share: float, *, has_drafts: bool, number: int = 60, prefill_seconds: float = 0.0) -> float:
        """Windows of a step of 0.2 s whose plans promise 100 tokens a second, of which `share` come; in each also a
        step with prefill. The handicap after."""
        for _ in range(number):
            self.calibration.begin(has_drafts=has_drafts, rate=100.0, num_rows=4, now=self.now)
            self.step(0.2, round(20 * share))
            if prefill_seconds:
                self.step(prefill_seconds, 4, skipped=True)
        self.calibration.begin(has_drafts=has_drafts, rate=100.0, num_rows=4, now=self.now)
        return self.calibration.handicap

    def step(self, seconds: float, num_tokens: int, *, skipped: bool = False) -> None:
        self.calibration.begin_step(self.now)
        if skipped:
            self.calibration.skip_step()
        self.now += seconds
        self.calibration.end_step(num_tokens, self.now)


def test_promises_that_are_kept_weigh_nothing() -> None:
    assert Windows().run(1.0, has_drafts=True) == pytest.approx(1.0, abs=0.01)


def test_drafts_that_bring_less_must_promise_more() -> None:
    assert Windows().run(0.8, has_drafts=True) == pytest.approx(1.25, abs=0.02)


def test_what_holds_back_both_alike_weighs_nothing() -> None:
    windows = Windows()
    windows.run(0.8, has_drafts=False, number=20)
    assert windows.run(0.8, has_drafts=True, number=20) == pytest.approx(1.0, abs=0.1)


def test_it_is_forgotten_when_it_is_not_tried() -> None:
    windows = Windows()
    before = windows.run(0.7, has_drafts=True)
    after = windows.run(1.0, has_drafts=False, number=300)
    assert after < 1.0 + 0.3 * (before - 1.0)


def test_a_step_with_prefill_says_nothing_and_the_others_of_its_window_do() -> None:
    assert Windows().run(1.0, has_drafts=True, prefill_seconds=0.3) == pytest.approx(1.0, abs=0.01)
    assert Windows().run(0.8, has_drafts=True, prefill_seconds=0.3) == pytest.approx(1.25, abs=0.02)


def test_one_bad_window_says_little() -> None:
    assert Windows().run(0.0, has_drafts=True, number=1) < 1.2
