"""Searches at run time for the draft temperature with the highest acceptance.

A draft model may be less or more certain than its target, so its proposals at the target's temperature are not always
the target's likeliest choices. A slow search on a grid of factors keeps the best one: six rounds in eight use it, and
one in eight uses each of its neighbours. The search moves to a neighbour whose acceptance is significantly higher.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

_STEP = 1.15
_MAX_EXPONENT = 5  # factors from 0.5 to 2
_TURNS = (0, 0, 0, 1, 0, 0, 0, -1)  # offsets from the best exponent, one for each round in turn
_MIN_TESTED = 400
_DOUBT = 2.6  # minimum difference in standard errors: one move in 200 is wrong
_FORGET = 4000  # tests after which the weight of older ones halves


@dataclass(slots=True)
class _Count:
    tested: float = 0.0
    accepted: float = 0.0

    @property
    def rate(self) -> float:
        return self.accepted / self.tested

    @property
    def variance(self) -> float:
        return max(self.rate * (1.0 - self.rate), 1e-3) / self.tested


class DraftTemperature:
    """Search for the best draft temperature for requests with one target temperature."""

    def __init__(self) -> None:
        self.best = 0
        self._turn = 0
        self._counts: dict[int, _Count] = defaultdict(_Count)

    def next_exponent(self) -> int:
        """Returns the exponent for the next rounds of one sequence."""
        self._turn = (self._turn + 1) % len(_TURNS)
        return max(-_MAX_EXPONENT, min(self.best + _TURNS[self._turn], _MAX_EXPONENT))

    def observe(self, exponent: int, num_tested: int, num_accepted: int) -> None:
        """Records that the target accepted `num_accepted` of `num_tested` drafts made with `exponent`."""
        if abs(exponent - self.best) > 1:
            return  # the round was drafted before the last move
        count = self._counts[exponent]
        count.tested += num_tested
        count.accepted += num_accepted
        if count.tested > _FORGET:
            count.tested /= 2
            count.accepted /= 2
        self._consider(exponent - 1 if exponent == self.best else exponent)
        if exponent == self.best:
            self._consider(exponent + 1)

    def _consider(self, exponent: int) -> None:
        """Moves to the neighbour `exponent` if its acceptance is significantly higher."""
        best, other = self._counts[self.best], self._counts[exponent]
        if exponent == self.best or min(best.tested, other.tested) < _MIN_TESTED:
            return
        if other.rate - best.rate > _DOUBT * math.sqrt(best.variance + other.variance):
            self.best = exponent
            self._counts.clear()


def factor_of(exponent: int) -> float:
    """Returns the draft's temperature divided by the target's temperature."""
    return float(_STEP**exponent)
