"""What a round costs, learned from what rounds took: nothing here is configured.

Two curves are learned: the target's step over its rows, and the draft's over its own. The rest of a link's
time (the network, and waiting behind other targets) is one number.

What is observed, in every step, is kept until someone asks, which is far rarer. It is not less to do, but between two
steps this code leaves the caches of the processor, and one call in 16 has to bring it back instead of every one: 36 us
for what takes 6 us in a row.
"""

from __future__ import annotations

import bisect
import math
import statistics
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_SCALE_RATE = 0.1
# A step scatters by 6 to 8 %, and a knot that is seen now and then must not take that for its own: with a rate of 0.4
# it went by its last two or three observations.
_KNOT_RATE = 0.02  # times the observations since the knot's last
_MAX_KNOT_RATE = 0.15
_MAX_KEPT = 16  # observations, when nobody asks
_OBSERVATIONS_A_FILL = 8  # after which the knots, which move by a few percent at a time, are made a curve again
_CLIP = 3.0  # one slow step (a page fault, a neighbour) must not move a curve far
_LINK_LEARNING_RATE = 0.1
_FIRST_REPLIES = 8  # of which the middle one tells a link's round trip


class LearnedCurve:
    """Seconds over a count, linear between knots at 1, 2, 3, 4, 6, 8, 12, 16, ... that follow what is observed.

    A machine that slows down does so for all counts: what one knot sees moves them all by a common factor, and each
    knot learns what it differs by beside that, the faster the longer it was not seen: a plain step among a dozen with
    drafts has to weigh as much as these, or what they shift the common factor by would stay with it.

    The curve never falls: more rows never cost less, so of knots that contradict each other the one seen last holds. A
    knot that nothing was observed near follows from its neighbours: below the first one that was, flat; above the last,
    with the slope of the curve's upper half.
    """

    def __init__(self, maximum: int) -> None:
        # Lists: one number at a time goes in and mostly out, once a step, for which NumPy takes ten times as long.
        self._knots = _knots(maximum)
        self._log_seconds: list[float | None] = [None] * len(self._knots)  # without the common factor
        self._log_scale = 0.0
        self._seen_at = [0] * len(self._knots)
        self._times_seen = [0] * len(self._knots)
        self._num_observations = 0
        self._kept: list[tuple[int, float]] = []  # counts and seconds, observed since someone asked
        self._filled: list[float] = []  # seconds at all knots, without the common factor
        self._fill_at = 0  # the number of observations at which they are reckoned anew

    @property
    def is_known(self) -> bool:
        return self._num_observations > 0 or bool(self._kept)

    def observe(self, count: int, seconds: float) -> None:
        """One step of `count` rows took `seconds`."""
        self._kept.append((count, seconds))
        if len(self._kept) >= _MAX_KEPT:
            self._take_in()

    def _take_in(self) -> None:
        kept, self._kept = self._kept, []
        for count, seconds in kept:
            self._learn_from(count, seconds)

    def _learn_from(self, count: int, seconds: float) -> None:
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
            # From what its neighbours let one expect of it: the observation may have been at another count.
            self._log_seconds[knot] = math.log(max(self._filled[knot], 1e-9)) + weight * error
            self._fill_at = 0
        else:
            rate = min(_MAX_KNOT_RATE, _KNOT_RATE * (self._num_observations - self._seen_at[knot]))
            # At first the mean of what was seen: one that was timed wrongly at start must not stay so for long.
            rate = max(rate, 1.0 / (1 + self._times_seen[knot]))
            self._log_seconds[knot] = known + rate * weight * error
            if rate >= _MAX_KNOT_RATE:
                self._fill_at = 0
        self._seen_at[knot] = self._num_observations
        self._times_seen[knot] += 1

    def seconds(self, count: float) -> float:
        """At one count. Something must have been observed."""
        self._take_in()
        return self._between(*self._place(count))

    def _between(self, index: int, share: float) -> float:
        filled = self._fill()
        seconds = filled[index] if share == 0.0 else (1.0 - share) * filled[index] + share * filled[index + 1]
        return seconds * math.exp(self._log_scale)

    def at(self, counts: float | FloatArray | IntArray) -> FloatArray:
        """Seconds at `counts`. Something must have been observed."""
        self._take_in()
        return np.asarray(np.interp(counts, self._knots, self._fill())) * math.exp(self._log_scale)

    def _place(self, count: float) -> tuple[int, float]:
        """The knot at or below `count`, and how far it is on the way to the next, in [0, 1]; nought at the last."""
        knots = self._knots
        index = max(bisect.bisect_right(knots, count) - 1, 0)
        if index + 1 == len(knots):
            return index, 0.0
        return index, max(0.0, (count - knots[index]) / (knots[index + 1] - knots[index]))

    def _known(self) -> list[tuple[int, float]]:
        """Knots and their seconds, which never fall: of two that contradict each other the one seen last holds."""
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
        """Else knots that contradict each other push it and themselves apart without end: numbers overflow in hours."""
        common = statistics.fmean(seconds for seconds in self._log_seconds if seconds is not None)
        self._log_seconds = [None if seconds is None else seconds - common for seconds in self._log_seconds]
        self._log_scale += common

    def _fill(self) -> list[float]:
        """The seconds at all knots, without the common factor."""
        if self._num_observations < self._fill_at:
            return self._filled
        knots, filled = self._knots, [0.0] * len(self._knots)
        last = -1  # the last knot that is known
        self._take_common_factor_out()
        for index, seconds in self._known():
            # What is learned next is learned of the curve as it is read: else what was held back of a knot would come
            # back with the next observation, and the common factor after it.
            self._log_seconds[index] = math.log(max(seconds, 1e-9))
            if last < 0:
                filled[:index] = [seconds] * index
            else:
                slope = (seconds - filled[last]) / (knots[index] - knots[last])
                for between in range(last + 1, index):
                    filled[between] = filled[last] + slope * (knots[between] - knots[last])
            filled[index], last = seconds, index
        half = bisect.bisect_right(knots, knots[last] / 2) - 1  # not the last two: their difference is mostly noise
        if 0 <= half < last:
            slope = (filled[last] - filled[half]) / (knots[last] - knots[half])
            for beyond in range(last + 1, len(knots)):
                filled[beyond] = filled[last] + slope * (knots[beyond] - knots[last])
        else:
            filled[last + 1 :] = [filled[last]] * (len(knots) - last - 1)
        self._filled, self._fill_at = filled, self._num_observations + _OBSERVATIONS_A_FILL
        return filled


def _knots(maximum: int) -> list[int]:
    knots, step = [1, 2, 3], 4
    while step < 2 * maximum:
        knots += [step, step * 3 // 2]
        step *= 2
    return knots


class DraftStep(NamedTuple):
    """One step of a drafter."""

    seconds: float  # 0: not known
    batch: int  # sequences
    rows: int  # of theirs
    is_first: bool = False  # whether some of them began a proposal in it


class LinkCosts:
    """What one draft worker's proposals take.

    A step of the draft costs by its rows. The first of a proposal has some more than one a sequence: a draft that was
    accepted last in its round was never an input of the drafter. So proposals of one token are dearer a token than
    deeper ones, and say by themselves little of what these would take.
    """

    def __init__(self, max_batch: int) -> None:
        self.largest_batch = 0  # whose step was observed
        self._draft_step = LearnedCurve(2 * max_batch)  # over its rows
        self._largest_rows = 1  # of a step that was observed: it is not known how much longer more would take
        self._first_rows, self._level_rows = 1.0, 1.0  # a sequence, in the first step of a proposal and in later ones
        self._overhead: float | None = None  # network, and waiting behind others' work
        self._first_overheads: list[float] = []
        self._waited_share = 1.0  # of the time that a proposal takes, what the target really waited
        self._replies: list[tuple[float, DraftStep]] = []  # kept until someone asks, with the overhead
        self._waits: list[tuple[float, int, int]] = []  # seconds, depth, batch

    @property
    def is_known(self) -> bool:
        self._take_in()
        return self._draft_step.is_known

    @property
    def round_trip_seconds(self) -> float:
        self._take_in()
        return self._overhead or 0.0

    def observe_reply(self, overhead_seconds: float, step: DraftStep) -> None:
        """A reply took `overhead_seconds` beside the time for which the worker held the request; `step` was its
        last."""
        self._replies.append((overhead_seconds, step))
        if len(self._replies) >= _MAX_KEPT:
            self._take_in()

    def observe_wait(self, waited_seconds: float, depth: int, batch: int) -> None:
        """A step waited `waited_seconds` for proposals of `depth` tokens of `batch` sequences."""
        self._waits.append((waited_seconds, depth, batch))
        if len(self._waits) >= _MAX_KEPT:
            self._take_in()

    def _take_in(self) -> None:
        replies, self._replies = self._replies, []
        for overhead, (step_seconds, batch, rows, is_first) in replies:
            if step_seconds > 0.0:
                self._draft_step.observe(max(1, rows), step_seconds)
                self.largest_batch = max(self.largest_batch, batch)
                self._largest_rows = max(self._largest_rows, rows)
                ratio = rows / max(1, batch)
                if is_first:
                    self._first_rows += _LINK_LEARNING_RATE * (ratio - self._first_rows)
                else:
                    self._level_rows += _LINK_LEARNING_RATE * (ratio - self._level_rows)
            overhead = max(0.0, overhead)
            if self._overhead is None or len(self._first_overheads) < _FIRST_REPLIES:
                # One that a page fault held up would make the link too dear to be asked again.
                self._first_overheads.append(overhead)
                self._overhead = statistics.median_low(self._first_overheads)
            else:
                most = _CLIP * self._overhead + 1e-3
                self._overhead += _LINK_LEARNING_RATE * (min(overhead, most) - self._overhead)
        waits, self._waits = self._waits, []
        for waited_seconds, depth, batch in waits:
            expected = self.proposal_seconds(depth, batch)
            if expected > 0.0:
                share = min(waited_seconds / expected, _CLIP)
                self._waited_share += _LINK_LEARNING_RATE * (share - self._waited_share)

    def expected_wait(self, depth: int, batch: int) -> float:
        """How long a step waits for proposals so deep, of so many sequences."""
        return self._waited_share * self.proposal_seconds(depth, batch)

    def wait_seconds(self, depths: IntArray, batches: IntArray) -> FloatArray:
        """`expected_wait` of many at once; nought at depth 0."""
        proposal_seconds = self.all_proposal_seconds(depths, batches)  # what was observed is taken in first
        seconds: FloatArray = np.where(depths > 0, self._waited_share * proposal_seconds, 0.0)
        return seconds

    def proposal_seconds(self, depth: int, batch: int) -> float:
        """From asking for a proposal to having it, when nothing was drafted ahead.

        More sequences than were ever drafted for are taken to take no longer: what is believed to be too cheap is tried
        and then known, what is believed to be too dear is never tried.
        """
        if depth == 0 or not self.is_known:
            return self.round_trip_seconds
        most, batch = self._largest_rows, max(batch, 1)
        seconds = self.round_trip_seconds + self._draft_step.seconds(min(self._first_rows * batch, most))
        if depth > 1:
            seconds += (depth - 1) * self._draft_step.seconds(min(self._level_rows * batch, most))
        return seconds

    def all_proposal_seconds(self, depths: IntArray, batches: IntArray) -> FloatArray:
        """`proposal_seconds` of many at once."""
        if not self.is_known:
            return np.full(np.shape(depths), self.round_trip_seconds)
        most, batches = self._largest_rows, np.maximum(batches, 1)
        first = self._draft_step.at(np.minimum(self._first_rows * batches, most))
        level = self._draft_step.at(np.minimum(self._level_rows * batches, most))
        drafting = np.where(depths > 0, first + (depths - 1) * level, 0.0)
        return np.asarray(self.round_trip_seconds + drafting)
