"""Learns the duration of each part of a round from measured rounds. No duration is configured.

The seconds of a target's step and the seconds of a drafter's step are learned as curves over the step's rows. The rest
of a link's time (the network, and the queue behind other targets' work) is one number.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cluster.speculation.learned_curve import LearnedCurve
from cluster.speculation.tuning import CLIP, KEEP, RATE, RECENT

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


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
                self._first_rows += RATE * (ratio - self._first_rows)
            else:
                self._level_rows += RATE * (ratio - self._level_rows)
        overhead = max(0.0, overhead_seconds)
        if self._overhead is None or len(self._first_overheads) < RECENT:  # one of the first may have been delayed
            self._first_overheads.append(overhead)
            self._overhead = statistics.median_low(self._first_overheads)
        else:
            most = CLIP * (self._overhead + step.seconds)
            self._overhead += RATE * (min(overhead, most) - self._overhead)

    def observe_wait(self, waited_seconds: float, depth: int, batch: int) -> None:
        """Learns from a step that waited `waited_seconds` for `batch` sequences that lacked at most `depth` levels."""
        expected = self.proposal_seconds(depth, batch)
        if expected > 0.0:
            share = min(waited_seconds / expected, CLIP)
            self._waited_share += RATE * (share - self._waited_share)

    def observe_ready(self, num_ready: Sequence[int], num_asked: Sequence[int]) -> None:
        """Learns from the sequences of a step: levels that were ready before any wait, and requested levels.

        Levels are ready before a wait if the drafter ran ahead.
        """
        levels = np.arange(1, len(self._asked) + 1)
        self._asked = KEEP * self._asked + (np.asarray(num_asked)[:, None] >= levels).sum(axis=0)
        self._ready = KEEP * self._ready + (np.asarray(num_ready)[:, None] >= levels).sum(axis=0)

    @property
    def is_readiness_known(self) -> bool:
        """True if enough sequences asked for drafts to measure how many levels are ready."""
        return bool(self._asked[0] >= RECENT)

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

            wait(d, b) = share * (round trip * lack(d) + level(b) * (lack(1) + ... + lack(d)))
            lack(j)    = 1 - ready(j)^b        probability that level j is missing for one of b sequences

        `share` is the measured ratio of waits to this formula. If no level is ever ready, the first level takes the
        time of a first step. A one-pass drafter has a first step in place of all levels.
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
