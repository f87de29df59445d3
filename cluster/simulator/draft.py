"""A draft worker's steps: what `cluster.drafting.worker` does with a simulated drafter, for its sequences at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cluster.config import Config
from cluster.config_speculation import window_of
from cluster.coordination.shadows import SHADOW_DEPTH
from cluster.drafting.run_ahead import average, is_about_to_answer
from cluster.drafting.worker import MAX_STEPS_WITHOUT_NEW
from cluster.engine.limits import StepLimits
from cluster.simulation.steps import StepCurve
from cluster.simulator.chances import Chances
from cluster.simulator.columns import NEVER, BoolArray, Columns
from cluster.simulator.overheads import Overheads
from cluster.speculation.depth import IntArray

_NUM_POSITIONS = 64
_DECAY = 0.998


@dataclass(frozen=True, slots=True)
class DraftStep:
    """One that is under way."""

    rows: IntArray
    epochs: IntArray
    grows: BoolArray  # which of them have another draft at its end
    is_ahead: bool
    is_computed: bool  # all prompts were, before it
    seconds: float


@dataclass(frozen=True, slots=True)
class Sent:
    """Proposals that a worker has sent."""

    rows: IntArray
    arrive_at: float


class DraftWorker:
    """Event by event: `turn` when there may be something to do, `end_step` when the step is over that it began."""

    def __init__(
        self,
        index: int,
        config: Config,
        columns: Columns,
        chances: Chances,
        way_seconds: float,
        overheads: Overheads,
        counted: tuple[float, float],
    ) -> None:
        """`way_seconds`: of a message, in one direction. `counted`: from when to when its steps are."""
        self.index = index
        self._counted = counted
        self.way_seconds = way_seconds
        self.step: DraftStep | None = None
        self.num_steps = 0  # of all time
        self.busy_seconds = 0.0
        self.num_counted_steps = self.num_counted_rows = 0
        self.wakes_at = NEVER  # while it is idle
        targets = config.target.replicas
        self.step_seconds = np.zeros(targets)  # of the last step with sequences of each target
        self.batches = np.zeros(targets, np.int64)  # its sequences in that step
        self.is_changed = False  # its sequences
        self._overheads = overheads
        self._columns = columns
        self._chances = chances
        self._curve = StepCurve(config.simulation.draft_step_ms)
        self._limits = StepLimits.of(config.draft, 2**62)
        self._max_len = config.draft.max_model_len or 2**62
        granted, deepest = config.speculation.granted_window, config.speculation.max_speculative_tokens
        self._windows = np.array([window_of(depth, granted) for depth in range(max(deepest, SHADOW_DEPTH) + 1)])
        self._runs_ahead = granted > 0
        self._closed_until = NEVER
        self._rows = np.zeros(0, np.int64)
        self._num_steps_without_new = 0
        self._ahead_seconds: float | None = None
        self._reached = np.full(_NUM_POSITIONS, 4.0)
        self._left = np.ones(_NUM_POSITIONS)

    def end_step(self, now: float) -> Sent | None:
        """What became complete goes out before anything else is looked at."""
        step, columns = self.step, self._columns
        assert step is not None
        self.step = None
        is_there = columns.epoch[step.rows] == step.epochs
        extended = step.rows[is_there & step.grows]
        columns.drafted[extended] += 1
        columns.is_computed[extended] = True
        if step.is_computed:
            counts = np.bincount(columns.target[step.rows[is_there]], minlength=len(self.batches))
            self.step_seconds[counts > 0] = step.seconds
            self.batches[counts > 0] = counts[counts > 0]
        if step.is_ahead:
            self._ahead_seconds = average(self._ahead_seconds, step.seconds)
            return None
        return self._collect(extended, now)

    def turn(self, now: float, refuse: Callable[[int, float], None]) -> tuple[Sent | None, float]:
        """Takes in what has arrived, answers what is there, begins a step if there is anything to do.

        Returns what was sent, and when to come back: at the step's end, or when something arrives.
        """
        columns = self._columns
        if self.is_changed:
            self.is_changed = False
            is_mine = (columns.link == self.index) & (columns.is_open | (columns.told_at < NEVER))
            self._rows = np.flatnonzero(is_mine)
        rows = self._rows
        arrived = rows[columns.told_at[rows] <= now]
        if arrived.size:
            self._take_in(arrived, now, refuse)
        rows = rows[columns.is_open[rows]]
        sent = self._collect(rows[columns.owes[rows]], now) if arrived.size else None
        self.step = self._begin(rows, now)
        if self.step is not None:
            self.wakes_at = NEVER
            self.num_steps += 1
            if self._counted[0] <= now <= self._counted[1]:
                self.busy_seconds += self.step.seconds
                self.num_counted_steps += 1
                self.num_counted_rows += len(self.step.rows)
            return sent, now + self._overheads.seconds(len(self.step.rows)) + self.step.seconds
        told_at = columns.told_at[self._rows]
        self.wakes_at = min(self._closed_until, float(told_at.min(initial=NEVER)))
        return sent, self.wakes_at

    # Taking in.

    def _take_in(self, arrived: IntArray, now: float, refuse: Callable[[int, float], None]) -> None:
        columns = self._columns
        is_opening = columns.is_opening[arrived]
        if is_opening.any():
            self._open(arrived[is_opening], now, refuse)
        rows = arrived[~is_opening]
        columns.told_at[arrived] = NEVER
        if not rows.size:
            return
        news = columns.told_length[rows] - columns.known[rows]
        right, drafted = columns.right[rows], columns.drafted[rows]
        if self._runs_ahead:
            self._observe(rows, news, np.minimum(right, drafted), now)
        came_true = (news <= right) & (news <= drafted)
        columns.drafted[rows] = drafted = np.where(came_true, drafted - news, 0)
        right = np.where(came_true, right - news, 0)
        columns.known[rows] = columns.told_length[rows]
        # What comes after the drafts that are kept is drafted at other places than was thought.
        columns.right[rows] = np.where(right < drafted, right, self._chances.draw(drafted))
        columns.owes[rows] = True
        self._want(rows)

    def _open(self, rows: IntArray, now: float, refuse: Callable[[int, float], None]) -> None:
        columns = self._columns
        num_open = int(columns.is_open[self._rows].sum())
        room = max(0, self._limits.max_num_seqs - num_open)
        fits = columns.told_length[rows] < self._max_len
        fits &= np.cumsum(fits) <= room
        for row in rows[~fits].tolist():
            refuse(row, now + self.way_seconds)
        rows = rows[fits]
        columns.is_open[rows] = columns.owes[rows] = True
        columns.is_computed[rows] = columns.is_opening[rows] = False
        columns.known[rows] = columns.prompt_left[rows] = columns.told_length[rows]
        columns.drafted[rows] = 0
        columns.right[rows] = self._chances.draw(columns.drafted[rows])
        columns.turnaround[rows] = NEVER
        self._want(rows)

    def _want(self, rows: IntArray) -> None:
        columns = self._columns
        columns.wanted[rows] = columns.told_depth[rows]
        columns.window[rows] = self._windows[columns.told_depth[rows]]

    def _observe(self, rows: IntArray, news: IntArray, right: IntArray, now: float) -> None:
        """Outcomes of proposals, before they are taken in: how long targets take, and where they go another way."""
        columns = self._columns
        wanted = columns.wanted[rows]
        told = ~columns.owes[rows] & (news > 0) & (columns.window[rows] > wanted) & (wanted > 0)
        rows, news, right, wanted = rows[told], news[told], right[told], wanted[told]
        if not rows.size:
            return
        seconds, before = now - columns.sent_at[rows], columns.turnaround[rows]
        columns.turnaround[rows] = np.where(before < NEVER, 0.9 * np.where(before < NEVER, before, 0.0), seconds)
        columns.turnaround[rows] += np.where(before < NEVER, 0.1 * seconds, 0.0)
        tested = np.minimum(np.minimum(news, columns.drafted[rows]), wanted + 1)
        has_left = right < tested
        num_reached = np.minimum(tested, right + 1)
        ends = np.bincount(np.minimum(num_reached, _NUM_POSITIONS), minlength=_NUM_POSITIONS + 1)
        reached = ends[::-1].cumsum()[::-1][1:]  # rounds that reached each position
        left = np.bincount(np.minimum(right[has_left], _NUM_POSITIONS - 1), minlength=_NUM_POSITIONS)
        keep = _DECAY**reached
        self._reached = keep * self._reached + reached
        self._left = keep * self._left + left

    # Steps.

    def _collect(self, rows: IntArray, now: float) -> Sent | None:
        columns = self._columns
        complete = columns.drafted[rows] >= columns.wanted[rows]
        complete |= columns.known[rows] + columns.drafted[rows] >= self._max_len
        done = rows[complete & columns.owes[rows]]
        if not done.size:
            return None
        columns.owes[done] = False
        columns.sent_at[done] = now
        columns.coming_at[done] = arrive_at = now + self.way_seconds
        columns.coming_base[done] = columns.known[done]
        columns.coming_length[done] = np.minimum(columns.drafted[done], columns.wanted[done])
        columns.coming_right[done] = columns.right[done]
        return Sent(done, arrive_at)

    def _begin(self, rows: IntArray, now: float) -> DraftStep | None:
        self._closed_until = NEVER
        columns = self._columns
        urgent = rows[columns.owes[rows]]
        is_ahead = not urgent.size
        if not is_ahead:
            is_computed = columns.is_computed[urgent]
            if is_computed.any() and self._num_steps_without_new < MAX_STEPS_WITHOUT_NEW:
                self._num_steps_without_new += not is_computed.all()
                batch = urgent[is_computed]
            else:
                self._num_steps_without_new = 0
                batch = urgent
        else:
            drafted = columns.drafted[rows]
            may = (drafted < columns.window[rows]) & (columns.known[rows] + drafted < self._max_len)
            batch = rows[may]
            if not batch.size:
                return None
            closed = self._closed_seconds(rows, now)
            if closed > 0.0:
                self._closed_until = now + closed
                return None
        return self._step(batch, is_ahead=is_ahead)

    def _step(self, batch: IntArray, *, is_ahead: bool) -> DraftStep:
        columns, budget = self._columns, self._limits.max_num_batched_tokens
        is_computed = columns.is_computed[batch]
        known = batch[is_computed][:budget]
        num_rows, prompts, grows = len(known), [], [True] * len(known)
        for row in batch[~is_computed].tolist() if len(known) < len(batch) else ():
            if num_rows == budget:
                break
            chunk = min(int(columns.prompt_left[row]), budget - num_rows)
            columns.prompt_left[row] -= chunk
            num_rows += max(chunk, 1)
            prompts.append(row)
            grows.append(not columns.prompt_left[row])
        rows = np.concatenate([known, np.array(prompts, np.int64)]) if prompts else known
        seconds = self._curve.at(num_rows)
        return DraftStep(rows, columns.epoch[rows], np.array(grows, np.bool_), is_ahead, not prompts, seconds)

    def _closed_seconds(self, rows: IntArray, now: float) -> float:
        """As `RunAhead.closed_seconds`."""
        if self._ahead_seconds is None:
            return 0.0
        columns = self._columns
        rows = rows[columns.turnaround[rows] < NEVER]
        chance = np.cumprod(1.0 - self._left / self._reached)[np.minimum(columns.wanted[rows], _NUM_POSITIONS - 1)]
        sent_at, turnaround = columns.sent_at[rows], columns.turnaround[rows]
        until = sent_at + 2.0 * turnaround
        needed = (1.0 - chance) * self._ahead_seconds
        closed = np.where(is_about_to_answer(now, sent_at + turnaround, needed, until), until - now, 0.0)
        return float(closed.max(initial=0.0))
