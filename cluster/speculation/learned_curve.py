"""A learned curve: seconds by the rows of a step."""

from __future__ import annotations

import bisect
import math
import statistics

import numpy as np
import numpy.typing as npt

from cluster.speculation.tuning import CLIP, RATE, RECENT

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class LearnedCurve:
    """Seconds by count: a curve that is linear between knots at 1, 2, 3, 4, 6, 8, 12, 16, ...

    A machine that slows down does so for all counts. So each observation moves all knots by a common factor, and the
    knots next to its count by the remaining error. A knot moves faster if its last observation is long ago: a single
    plain step among more than a hundred steps with drafts must weigh as much as a dozen of these.

    The curve never falls: if two knots contradict each other, the one observed last is kept. Knots without observations
    are interpolated between the observed ones. Below the first observed knot the curve is flat; above the last observed
    knot it continues with the slope of its upper half.
    """

    def __init__(self, maximum: int) -> None:
        # Lists, not arrays: most accesses are to single numbers, for which NumPy takes ten times as long.
        self._knots = knots(maximum)
        self._log_seconds: list[float | None] = [None] * len(self._knots)  # without the common factor
        self._log_scale = 0.0
        self._seen_at = [0] * len(self._knots)
        self._times_seen = [0] * len(self._knots)
        self._num_observations = 0
        self._filled: list[float] = []  # seconds at all knots, without the common factor
        self._fill_at = 0  # number of observations at which `_filled` is computed again

    @property
    def is_known(self) -> bool:
        return self._num_observations > 0

    def observe(self, count: int, seconds: float) -> None:
        """Learns from a step with `count` rows that took `seconds`."""
        index, share = self._place(count)
        if self._num_observations == 0:
            self._filled, self._fill_at = [max(seconds, 1e-9)] * len(self._knots), 1
        expected = max(self._between(index, share), 1e-9)
        error = math.log(min(max(seconds, 1e-9) / expected, CLIP))
        self._num_observations += 1
        self._learn(index, 1.0 - share, error)
        if share > 0.0:
            self._learn(index + 1, share, error)
        self._log_scale += RATE * error

    def _learn(self, knot: int, weight: float, error: float) -> None:
        known = self._log_seconds[knot]
        if known is None:
            # The knot starts from the curve's prediction, because the observation may have been at another count.
            self._log_seconds[knot] = math.log(max(self._filled[knot], 1e-9)) + weight * error
            self._fill_at = 0
        else:
            rate = RATE * min(1.0, (self._num_observations - self._seen_at[knot]) / RECENT)
            # A knot starts as the mean of its observations, so that a delayed first step does not persist.
            rate = max(rate, 1.0 / (1 + self._times_seen[knot]))
            self._log_seconds[knot] = known + rate * weight * error
            if rate >= RATE:
                self._fill_at = 0
        self._seen_at[knot] = self._num_observations
        self._times_seen[knot] += 1

    def seconds(self, count: float) -> float:
        """Returns the seconds at `count`. Requires at least one observation."""
        return self._between(*self._place(count))

    def _between(self, index: int, share: float) -> float:
        filled = self._fill()
        seconds = filled[index] if share == 0.0 else (1.0 - share) * filled[index] + share * filled[index + 1]
        return seconds * math.exp(self._log_scale)

    def at(self, counts: float | FloatArray | IntArray) -> FloatArray:
        """Returns the seconds at `counts`. Requires at least one observation."""
        return np.asarray(np.interp(counts, self._knots, self._fill())) * math.exp(self._log_scale)

    def _place(self, count: float) -> tuple[int, float]:
        """Returns the knot at or below `count`, and the share of the way to the next knot, in [0, 1].

        The share is 0 at the last knot.
        """
        knots = self._knots
        index = max(bisect.bisect_right(knots, count) - 1, 0)
        if index + 1 == len(knots):
            return index, 0.0
        return index, max(0.0, (count - knots[index]) / (knots[index + 1] - knots[index]))

    def _known(self) -> list[tuple[int, float]]:
        """Returns the observed knots and their seconds, which never fall.

        If two knots contradict each other, the one observed last is kept.
        """
        known: list[tuple[int, float]] = []
        for index, log_seconds in enumerate(self._log_seconds):
            if log_seconds is None:
                continue
            seconds = math.exp(log_seconds)
            before = len(known)
            while (
                before and known[before - 1][1] > seconds and self._seen_at[known[before - 1][0]] < self._seen_at[index]
            ):
                before -= 1
            seconds = max(seconds, known[before - 1][1]) if before else seconds
            known[before:] = [(earlier, seconds) for earlier, _ in known[before:]]
            known.append((index, seconds))
        return known

    def _take_common_factor_out(self) -> None:
        """Moves the knots' mean into the common factor: contradictory knots would otherwise grow without bound."""
        common = statistics.fmean(seconds for seconds in self._log_seconds if seconds is not None)
        self._log_seconds = [None if seconds is None else seconds - common for seconds in self._log_seconds]
        self._log_scale += common

    def _fill(self) -> list[float]:
        """Returns the seconds at all knots, without the common factor."""
        if self._num_observations < self._fill_at:
            return self._filled
        knots, filled = self._knots, [0.0] * len(self._knots)
        last = -1  # the last observed knot so far
        self._take_common_factor_out()
        for index, seconds in self._known():
            # Store the value that `_known` corrected: errors are measured against it, and the uncorrected value would
            # return with the next observation of the knot.
            self._log_seconds[index] = math.log(max(seconds, 1e-9))
            if last < 0:
                filled[:index] = [seconds] * index
            else:
                slope = (seconds - filled[last]) / (knots[index] - knots[last])
                for between in range(last + 1, index):
                    filled[between] = filled[last] + slope * (knots[between] - knots[last])
            filled[index], last = seconds, index
        half = bisect.bisect_right(knots, knots[last] / 2) - 1  # the slope between the last two knots is mostly noise
        if 0 <= half < last:
            slope = (filled[last] - filled[half]) / (knots[last] - knots[half])
            for beyond in range(last + 1, len(knots)):
                filled[beyond] = filled[last] + slope * (knots[beyond] - knots[last])
        else:
            filled[last + 1 :] = [filled[last]] * (len(knots) - last - 1)
        self._filled, self._fill_at = filled, self._num_observations + RECENT
        return filled


def knots(maximum: int) -> list[int]:
    knots, step = [1, 2, 3], 4
    while step < 2 * maximum:
        knots += [step, step * 3 // 2]
        step *= 2
    return knots
