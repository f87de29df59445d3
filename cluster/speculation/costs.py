"""What a round costs, learned from what rounds took: nothing here is configured.

Two curves are learned: the target's step over its rows, and the draft's step over its batch. The rest of a link's
time (the network, and waiting behind other targets) is one number.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_SCALE_RATE = 0.1
_KNOT_RATE = 0.05
_STALE_KNOT_RATE = 0.4
_STALE = 32  # observations since a knot's last
_CLIP = 3.0  # one slow step (a page fault, a neighbour) must not move a curve far
_LINK_LEARNING_RATE = 0.1


class LearnedCurve:
    """Seconds over a count, linear between knots at 1, 2, 3, 4, 6, 8, 12, 16, ... that follow what is observed.

    A machine that slows down does so for all counts: what one knot sees moves them all by a common factor, and each
    knot learns what is its own beside that, fast when it was not seen for long. The curve never falls: more rows
    never cost less. A knot that nothing was observed near follows from its neighbours: below the first one that was,
    flat; above the last, along the last slope that was seen.
    """

    def __init__(self, maximum: int) -> None:
        self._knots = np.array(_knots(maximum), dtype=np.float64)
        self._log_seconds = np.full(len(self._knots), np.nan)  # without the common factor
        self._log_scale = 0.0
        self._seen_at = np.zeros(len(self._knots), dtype=np.int64)
        self._num_observations = 0
        self._filled: FloatArray | None = None

    @property
    def is_known(self) -> bool:
        return self._num_observations > 0

    def observe(self, count: int, seconds: float) -> None:
        """One step of `count` rows took `seconds`."""
        index = int(np.searchsorted(self._knots, count, side="right")) - 1
        index = min(max(index, 0), len(self._knots) - 1)
        low, high = self._knots[index], self._knots[min(index + 1, len(self._knots) - 1)]
        share = min(1.0, (count - low) / (high - low)) if high > low else 0.0
        expected = max(float(self.at(count)), 1e-9) if self.is_known else seconds
        error = math.log(min(max(seconds, 1e-9) / expected, _CLIP))
        self._num_observations += 1
        for knot, weight in ((index, 1.0 - share), (index + 1, share)):
            if weight == 0.0:
                continue
            if np.isnan(self._log_seconds[knot]):
                self._log_seconds[knot] = math.log(expected) + weight * error - self._log_scale
            else:
                is_stale = self._num_observations - self._seen_at[knot] > _STALE
                self._log_seconds[knot] += (_STALE_KNOT_RATE if is_stale else _KNOT_RATE) * weight * error
            self._seen_at[knot] = self._num_observations
        self._log_scale += _SCALE_RATE * error
        self._filled = None

    def at(self, counts: float | FloatArray | IntArray) -> FloatArray:
        """Seconds at `counts`. Something must have been observed."""
        if self._filled is None:
            self._filled = self._fill()
        return np.asarray(np.interp(counts, self._knots, self._filled))

    def _fill(self) -> FloatArray:
        known = np.flatnonzero(~np.isnan(self._log_seconds))
        knots = self._knots[known]
        seconds = np.maximum.accumulate(np.exp(self._log_seconds[known] + self._log_scale))
        filled: FloatArray = np.interp(self._knots, knots, seconds)
        beyond = self._knots > knots[-1]
        if len(knots) > 1:
            slope = (seconds[-1] - seconds[-2]) / (knots[-1] - knots[-2])
            filled[beyond] = seconds[-1] + slope * (self._knots[beyond] - knots[-1])
        return filled


def _knots(maximum: int) -> list[int]:
    knots, step = [1, 2, 3], 4
    while step < 2 * maximum:
        knots += [step, step * 3 // 2]
        step *= 2
    return knots


class LinkCosts:
    """What one draft worker's proposals take."""

    def __init__(self, max_batch: int) -> None:
        self._draft_step = LearnedCurve(max_batch)
        self._overhead: float | None = None  # network, and waiting behind others' work
        self._waited_share = 1.0  # of the time that a proposal takes, what the target really waited

    @property
    def is_known(self) -> bool:
        return self._draft_step.is_known

    @property
    def round_trip_seconds(self) -> float:
        return self._overhead or 0.0

    def observe_reply(self, answer_seconds: float, held_seconds: float, step_seconds: float, batch: int) -> None:
        """A reply came `answer_seconds` after it was asked for, of which the worker held the request for
        `held_seconds`; its steps of `batch` sequences take `step_seconds` each."""
        if step_seconds > 0.0:
            self._draft_step.observe(max(1, batch), step_seconds)
        overhead = max(0.0, answer_seconds - held_seconds)
        if self._overhead is None:
            self._overhead = overhead
        self._overhead += _LINK_LEARNING_RATE * (min(overhead, _CLIP * self._overhead + 1e-3) - self._overhead)

    def observe_wait(self, waited_seconds: float, depth: int, batch: int) -> None:
        """A step waited `waited_seconds` for proposals of `depth` tokens of `batch` sequences."""
        expected = float(self._proposal_seconds(depth, batch))
        if expected > 0.0:
            share = min(waited_seconds / expected, _CLIP)
            self._waited_share += _LINK_LEARNING_RATE * (share - self._waited_share)

    def wait_seconds(self, depths: IntArray, batches: IntArray) -> FloatArray:
        """How long a step waits for proposals so deep, of so many sequences; nought at depth 0."""
        seconds: FloatArray = np.where(depths > 0, self._waited_share * self._proposal_seconds(depths, batches), 0.0)
        return seconds

    def proposal_seconds(self, depth: int, batch: int) -> float:
        """From asking for a proposal to having it, when nothing was drafted ahead."""
        return float(self._proposal_seconds(depth, batch))

    def _proposal_seconds(self, depths: int | IntArray, batches: int | IntArray) -> FloatArray:
        step = self._draft_step.at(np.maximum(batches, 1)) if self.is_known else 0.0
        return np.asarray(self.round_trip_seconds + depths * step)
