"""Learns the duration of each part of a round from measured rounds. No duration is configured.

The seconds of a target's step and the seconds of a drafter's step are learned as curves over the step's rows. The rest
of a link's time (the network, and the queue behind other targets' work) is one number.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_SCALE_RATE = 0.1  # learning rate of the factor that all knots of a curve share
# The learning rate of a knot grows by `_KNOT_RATE` with every observation of the curve since the knot was observed, up
# to `_MAX_KNOT_RATE`. Step times scatter by 6 to 8 %. With a rate of 0.4 a knot followed its last two or three
# observations, and the ratio of two knots varied by 6.5 % instead of 3.7 %.
_KNOT_RATE = 0.02
_MAX_KNOT_RATE = 0.15
_OBSERVATIONS_PER_FILL = 8  # a fill takes three times as long as an observation, which moves knots by a few percent
_CLIP = 3.0  # a step delayed by a page fault or a neighbour counts as at most three times the expected time
_LINK_LEARNING_RATE = 0.1  # learning rate per reply: the last ten replies count most
_READY_DECAY = 0.98  # decay of the counts of ready drafts, per observed step
_FIRST_REPLIES = 8  # a link's first round trip is the median over these replies, because one may have been delayed


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
        self._knots = _knots(maximum)
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
        error = math.log(min(max(seconds, 1e-9) / expected, _CLIP))
        self._num_observations += 1
        self._learn(index, 1.0 - share, error)
        if share > 0.0:
            self._learn(index + 1, share, error)
        self._log_scale += _SCALE_RATE * error

    def _learn(self, knot: int, weight: float, error: float) -> None:
        known = self._log_seconds[knot]
        if known is None:
            # The knot starts from the curve's prediction, because the observation may have been at another count.
            self._log_seconds[knot] = math.log(max(self._filled[knot], 1e-9)) + weight * error
            self._fill_at = 0
        else:
            rate = min(_MAX_KNOT_RATE, _KNOT_RATE * (self._num_observations - self._seen_at[knot]))
            # A knot starts as the mean of its observations, so that a delayed first step does not persist.
            rate = max(rate, 1.0 / (1 + self._times_seen[knot]))
            self._log_seconds[knot] = known + rate * weight * error
            if rate >= _MAX_KNOT_RATE:
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
        self._filled, self._fill_at = filled, self._num_observations + _OBSERVATIONS_PER_FILL
        return filled


def _knots(maximum: int) -> list[int]:
    knots, step = [1, 2, 3], 4
    while step < 2 * maximum:
        knots += [step, step * 3 // 2]
        step *= 2
    return knots


class DraftStep(NamedTuple):
    """Measurements of one step of a drafter."""

    seconds: float  # 0: unknown
    batch: int  # sequences
    rows: int  # tokens of these sequences
    is_first: bool = False  # whether some sequences began a proposal in the step


class LinkCosts:
    """Predicts the duration of one draft worker's proposals.

    The duration of a drafter's step depends on its rows. The first step of a proposal has more than one row per
    sequence, because the last accepted draft of a round was never an input of the drafter. So a proposal of one token
    costs more per token than a deeper proposal, and predicts its duration poorly. A drafter with `is_one_pass` makes
    the whole proposal in the first step; the duration of this step is learned from the recently requested depths.
    """

    def __init__(self, max_batch: int, max_depth: int = 1, *, is_one_pass: bool = False) -> None:
        self.is_one_pass = is_one_pass
        self.largest_batch = 0  # sequences of the largest observed step
        self._draft_step = LearnedCurve(2 * max_batch)  # over its rows
        self._largest_rows = 1  # rows of the largest observed step
        self._first_rows, self._level_rows = 1.0, 1.0  # rows per sequence in the first step of a proposal, and later
        self._overhead: float | None = None  # time of the network and of the queue behind other work
        self._first_overheads: list[float] = []
        self._waited_share = 1.0  # waits of steps, relative to the predicted time of the proposals
        # For each level: sequences with a request for that level, and those for which it was ready before a wait.
        self._asked, self._ready = np.full(max_depth, 1e-9), np.zeros(max_depth)

    @property
    def is_known(self) -> bool:
        return self._draft_step.is_known

    @property
    def round_trip_seconds(self) -> float:
        return self._overhead or 0.0

    def observe_reply(self, overhead_seconds: float, step: DraftStep) -> None:
        """Learns from a reply.

        `overhead_seconds`: time from the message to the reply, minus the time for which the worker held the reply.
        `step`: the worker's last step.
        """
        if step.seconds > 0.0:
            self._draft_step.observe(max(1, step.rows), step.seconds)
            self.largest_batch = max(self.largest_batch, step.batch)
            self._largest_rows = max(self._largest_rows, step.rows)
            ratio = step.rows / max(1, step.batch)
            if step.is_first:
                self._first_rows += _LINK_LEARNING_RATE * (ratio - self._first_rows)
            else:
                self._level_rows += _LINK_LEARNING_RATE * (ratio - self._level_rows)
        overhead = max(0.0, overhead_seconds)
        if self._overhead is None or len(self._first_overheads) < _FIRST_REPLIES:
            self._first_overheads.append(overhead)
            self._overhead = statistics.median_low(self._first_overheads)
        else:
            most = _CLIP * self._overhead + 1e-3
            self._overhead += _LINK_LEARNING_RATE * (min(overhead, most) - self._overhead)

    def observe_wait(self, waited_seconds: float, depth: int, batch: int) -> None:
        """Learns from a step that waited `waited_seconds` for `batch` sequences that lacked at most `depth` levels."""
        expected = self.proposal_seconds(depth, batch)
        if expected > 0.0:
            share = min(waited_seconds / expected, _CLIP)
            self._waited_share += _LINK_LEARNING_RATE * (share - self._waited_share)

    def observe_ready(self, num_ready: Sequence[int], num_asked: Sequence[int]) -> None:
        """Learns from the sequences of a step: levels that were ready before any wait, and requested levels.

        Levels are ready before a wait if the drafter ran ahead.
        """
        levels = np.arange(1, len(self._asked) + 1)
        self._asked = _READY_DECAY * self._asked + (np.asarray(num_asked)[:, None] >= levels).sum(axis=0)
        self._ready = _READY_DECAY * self._ready + (np.asarray(num_ready)[:, None] >= levels).sum(axis=0)

    @property
    def ready_shares(self) -> FloatArray:
        """For levels 1, 2, ...: the share of requests for which that level was ready before the step waited."""
        # A level without recent requests gets the share of the previous level, so that it is tried again.
        shares, before = np.empty(len(self._asked)), self._ready[0] / self._asked[0]
        for level, (asked, ready) in enumerate(zip(self._asked.tolist(), self._ready.tolist(), strict=True)):
            before = shares[level] = min(before, (ready + before) / (asked + 1.0))
        return shares

    def ready_at(self, levels: IntArray) -> FloatArray:
        """Returns the `ready_shares` at `levels`."""
        return np.asarray(self.ready_shares[np.clip(levels, 1, len(self._asked)) - 1])

    def wait_seconds(self, depths: IntArray, batches: IntArray) -> FloatArray:
        """Returns the seconds that a step waits until `batches` sequences all have `depths` drafts; 0 at depth 0.

        Levels that are ready for all of these sequences cost no wait.
        """
        batches = np.maximum(batches, 1)
        first, level = (
            self._rows_seconds(np.asarray(rows * batches, np.float64)) for rows in (self._first_rows, self._level_rows)
        )
        if self.is_one_pass:
            level = np.zeros_like(level)
        shares = self.ready_shares
        if shares[0] == 0.0:
            seconds = self.round_trip_seconds + first + (depths - 1) * level
        else:
            sizes, places = np.unique(batches, return_inverse=True)
            lack = 1.0 - shares ** sizes[:, None]  # [sizes, levels]
            at = places.reshape(np.shape(batches)), np.clip(depths, 1, len(shares)) - 1
            whole = self.round_trip_seconds + (first if self.is_one_pass else 0.0)
            seconds = whole * lack[at] + level * np.cumsum(lack, axis=1)[at]
        return np.asarray(np.where(depths > 0, self._waited_share * seconds, 0.0))

    def proposal_seconds(self, depth: int, batch: int) -> float:
        """Returns the seconds from a request to its proposal if the drafter did not run ahead."""
        if depth == 0:
            return self.round_trip_seconds
        first, level = (self._step_seconds(rows * max(batch, 1)) for rows in (self._first_rows, self._level_rows))
        return self.round_trip_seconds + first + (0.0 if self.is_one_pass else (depth - 1) * level)

    def _step_seconds(self, rows: float) -> float:
        """Returns the seconds of a step with `rows` rows, as `_rows_seconds` does."""
        return self._draft_step.seconds(min(rows, self._largest_rows)) if self.is_known else 0.0

    def _rows_seconds(self, rows: float | FloatArray) -> FloatArray:
        """Returns the seconds of steps with `rows` rows.

        Assumes that a step with more rows than any observed step takes no longer than the largest observed step. If
        this underestimates the cost, the step is tried and measured; a step with an overestimated cost would never be
        tried.
        """
        if not self.is_known:
            return np.zeros(np.shape(rows))
        return self._draft_step.at(np.minimum(rows, self._largest_rows))
