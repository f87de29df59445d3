"""For whose proposals a step waits, and how long: what `cluster.coordination.waiting` does for sequences one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.coordination.sequence import ActiveLink
from cluster.coordination.stats import CoordinatorStats
from cluster.coordination.waiting import pays_alone, slows_others
from cluster.simulator.columns import NEVER, Columns
from cluster.simulator.planner import Planner
from cluster.speculation.depth import IntArray

_NONE = np.zeros(0, np.int64)


@dataclass(slots=True)
class _Wait:
    started_at: float
    rows: IntArray


class Waits:
    """Belongs to a target's rounds, whose parts it is given."""

    def __init__(
        self,
        columns: Columns,
        planner: Planner,
        stats: CoordinatorStats,
        links: Sequence[ActiveLink],
        first_link: int,
        timeout_seconds: float,
        verified_depth: Callable[[IntArray], IntArray],
    ) -> None:
        """`verified_depth`: how many drafts of each sequence a step verifies."""
        self.held_back: IntArray = _NONE  # sequences that the step goes on without
        self.seconds = 0.0  # that the step has waited
        self._columns = columns
        self._planner = planner
        self._stats = stats
        self._links = links
        self._first_link = first_link
        self._timeout = timeout_seconds
        self._verified_depth = verified_depth
        self._num_owed = np.zeros(len(links), np.int64)
        self._depth_owed = np.zeros(len(links), np.int64)
        self._wait: _Wait | None = None

    def owe(self, places: IntArray, depths: IntArray) -> None:
        """The workers at `places` were each asked for proposals so deep."""
        self._num_owed += np.bincount(places, minlength=len(self._links))
        np.maximum.at(self._depth_owed, places, depths)

    def begin(self, decoding: IntArray, now: float) -> float | None:
        """A step of `decoding` begins to wait for proposals. Returns when to `wake`; None: it need not wait."""
        columns, planner = self._columns, self._planner
        self.held_back, self.seconds = _NONE, 0.0
        if not self._links or planner.leaves_drafts_out:
            return None
        since, is_late = columns.awaited_since[decoding], columns.is_late[decoding]
        has_depth = columns.depth[decoding] > 0
        is_awaited = (since < NEVER) & ~is_late & has_depth
        if is_late.any() or is_awaited.any():
            has_answered = columns.has_answered[decoding]
            if ((since == NEVER) | has_answered).any():
                # Drafters of new sequences still compute the tokens that these were opened with: others do not wait.
                columns.is_late[decoding[is_awaited & ~has_answered]] = True
                is_awaited &= has_answered
            is_late = columns.is_late[decoding]
            self._went_without(decoding[is_late], decoding[is_awaited])
        if not is_awaited.any():
            self._waited(_NONE, now, now)
            return None
        awaited = decoding[is_awaited]
        if len(awaited) < len(decoding) and planner.needs.measurements and planner.step_seconds.is_known:
            to_wait = self._seconds_to_wait(awaited, now)
            num_plain = int(((columns.link[decoding] < 0) & has_depth).sum())
            rows_awaited = len(awaited) + int(columns.depth[awaited].sum())
            if num_plain > len(awaited) and slows_others(
                to_wait, planner.step_seconds.seconds(num_plain + rows_awaited)
            ):
                self._waited(_NONE, now, now)
                return None
            ready = decoding[~is_awaited]
            rows_ready = len(ready) + int(self._verified_depth(ready).sum())
            tokens_ready = float(columns.expected[ready].sum())
            tokens = tokens_ready + float(columns.expected[awaited].sum())
            rows = rows_ready, rows_ready + rows_awaited
            if pays_alone(planner.step_seconds, rows, (tokens_ready, tokens), to_wait):
                self.held_back = awaited
                return None
        columns.is_waited_for[awaited] = True
        self._wait = _Wait(now, awaited)
        return self._wakes_at(awaited)

    @property
    def is_waiting(self) -> bool:
        """For proposals."""
        return self._wait is not None

    def wakes_at(self) -> float | None:
        """When to `wake`, now that more proposals are on their way; None: nothing is waited for."""
        return None if self._wait is None else self._wakes_at(self._still_awaited(self._wait.rows))

    def wake(self, now: float) -> float | None:
        """Proposals have come, or it is time to give some up. Returns what `begin` returns."""
        wait, columns = self._wait, self._columns
        assert wait is not None
        rows = wait.rows
        is_awaited = columns.is_waited_for[rows]
        here = is_awaited & (columns.coming_at[rows] <= now)
        given_up = is_awaited & ~here & (now >= columns.awaited_since[rows] + self._timeout)
        if given_up.any():
            columns.is_late[rows[given_up]] = True
            self._stats.num_late_rounds += int(given_up.sum())
        columns.is_waited_for[rows[here | given_up]] = False
        left = self._still_awaited(rows)
        if left.size:
            return self._wakes_at(left)
        self._wait = None
        self._waited(rows, wait.started_at, now)
        self.seconds = now - wait.started_at
        return None

    def _wakes_at(self, rows: IntArray) -> float:
        """When the next of `rows` that are waited for is given up, or all have come."""
        columns = self._columns
        until = float(columns.awaited_since[rows].min()) + self._timeout
        return min(until, float(columns.coming_at[rows].max()))

    def _still_awaited(self, rows: IntArray) -> IntArray:
        return rows[self._columns.is_waited_for[rows]]

    def _seconds_to_wait(self, awaited: IntArray, now: float) -> float:
        columns = self._columns
        place = columns.link[awaited] - self._first_link
        takes = np.zeros(len(awaited))
        for number, batch in enumerate(np.bincount(place).tolist()):
            if batch:
                costs, mine = self._links[number].costs, place == number
                takes[mine] = costs.all_proposal_seconds(columns.levels[awaited[mine]], np.array([batch]))
        return max(0.0, float((columns.awaited_since[awaited] + takes).max()) - now)

    def _went_without(self, late: IntArray, awaited: IntArray) -> None:
        columns, size = self._columns, len(self._links)
        links = columns.link[late]
        is_late = np.bincount(links[links >= 0] - self._first_link, minlength=size) > 0
        is_late &= np.bincount(columns.link[awaited] - self._first_link, minlength=size) == 0
        self._num_owed[is_late] = self._depth_owed[is_late] = 0

    def _waited(self, rows: IntArray, started_at: float, now: float) -> None:
        """A step has waited since then for the proposals of `rows`, and for those of no other link at all."""
        if not self._num_owed.any():
            return
        seconds = np.zeros(len(self._links))
        if rows.size:
            came_at = np.minimum(self._columns.coming_at[rows], now)
            seconds[:] = float(came_at.min())
            np.maximum.at(seconds, self._columns.link[rows] - self._first_link, came_at)
            seconds -= started_at
        for place in self._num_owed.nonzero()[0].tolist():
            costs = self._links[place].costs
            costs.observe_wait(float(seconds[place]), int(self._depth_owed[place]), int(self._num_owed[place]))
        self._num_owed[:] = self._depth_owed[:] = 0
