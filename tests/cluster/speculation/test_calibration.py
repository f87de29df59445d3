"""Promises are held against what came of them."""

from __future__ import annotations

import pytest

from cluster.speculation.calibration import Calibration


class Windows:
    def __init__(self) -> None:
        self.calibration = Calibration()
        self.now = 0.0

    def run(self, share: float, *, has_drafts: bool, number: int = 60, spoiled: bool = False) -> float:
        """Windows of 0.2 s whose plans promise 100 tokens a second, of which `share` come; the handicap after."""
        for _ in range(number):
            self.calibration.begin(has_drafts=has_drafts, rate=100.0, num_rows=4, now=self.now)
            self.calibration.count(round(20 * share))
            if spoiled:
                self.calibration.spoil()
            self.now += 0.2
        self.calibration.begin(has_drafts=has_drafts, rate=100.0, num_rows=4, now=self.now)
        return self.calibration.handicap


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


def test_a_spoiled_window_says_nothing() -> None:
    assert Windows().run(0.2, has_drafts=True, spoiled=True) == 1.0


def test_one_bad_window_says_little() -> None:
    assert Windows().run(0.0, has_drafts=True, number=1) < 1.2
