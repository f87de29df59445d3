"""How long a step waits for the proposals it is owed, and for whose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from cluster.coordination.link import DraftLink
from cluster.coordination.planner import DepthPlanner
from cluster.coordination.sequence import SpeculativeSequence
from cluster.coordination.spread import Spread
from cluster.coordination.stats import CoordinatorStats


class Waits:
    """Belongs to a coordinator, whose parts it is given; `take_events(seconds)` takes in what happens meanwhile."""

    def __init__(
        self,
        planner: DepthPlanner,
        spread: Spread,
        stats: CoordinatorStats,
        timeout_seconds: float,
        clock: Callable[[], float],
        take_events: Callable[[float], None],
    ) -> None:
        self._planner = planner
        self._spread = spread
        self._stats = stats
        self._timeout = timeout_seconds
        self._clock = clock
        self._take_events = take_events

    def wait(self, sequences: Sequence[SpeculativeSequence]) -> Sequence[SpeculativeSequence]:
        """As `Coordinator.wait`."""
        awaited = [s for s in sequences if s.awaited_since is not None and not s.is_late and s.depth > 0]
        if not awaited:
            self._learn((), 0.0)
            return ()
        now = started_at = self._clock()
        if len(awaited) < len(sequences):
            to_wait = self._seconds_to_wait(awaited, now)
            if self._planner.should_not_wait(_num_without_drafter(sequences), awaited, to_wait):
                self._learn((), 0.0)
                return ()
            ready = [s for s in sequences if not (s.depth > 0 and s.is_awaited)]
            if self._planner.should_go_on_without(ready, awaited, to_wait):
                return awaited
        while awaited:
            deadline = min([s.awaited_since for s in awaited if s.awaited_since is not None]) + self._timeout
            if now >= deadline:
                self._give_up(awaited, now)
            else:
                self._take_events(deadline - now)
                now = self._clock()
            awaited = [s for s in awaited if s.awaited_since is not None and not s.is_late]
            self._learn({s.link for s in awaited}, now - started_at)
        return ()

    def _seconds_to_wait(self, awaited: Sequence[SpeculativeSequence], now: float) -> float:
        """Until the last proposal of `awaited` is here."""
        batches = Counter(s.link for s in awaited)
        to_wait = 0.0
        for sequence in awaited:
            assert sequence.link is not None
            assert sequence.awaited_since is not None
            costs = self._spread.uses[sequence.link].costs
            takes = costs.proposal_seconds(sequence.num_levels, batches[sequence.link])
            to_wait = max(to_wait, sequence.awaited_since + takes - now)
        return to_wait

    def _give_up(self, awaited: Sequence[SpeculativeSequence], now: float) -> None:
        """No step waits any more for those of `awaited` whose time is over."""
        for sequence in awaited:
            if sequence.awaited_since is not None and now >= sequence.awaited_since + self._timeout:
                sequence.is_late = True
                self._stats.num_late_rounds += 1
                if sequence.link is not None:
                    use = self._spread.uses[sequence.link]
                    use.late_since = use.late_since or now

    def _learn(self, still_awaited: Collection[DraftLink | None], waited: float) -> None:
        """The step waited so long for the proposals of all links but those."""
        for link, use in self._spread.uses.items():
            if use.num_owed and link not in still_awaited:
                use.costs.observe_wait(waited, use.depth_owed, use.num_owed)
                use.num_owed = use.depth_owed = 0


def _num_without_drafter(sequences: Sequence[SpeculativeSequence]) -> int:
    """Those for which there is no room, or that asked for k = 0. A plan that gives a sequence nothing has weighed
    its time already."""
    return sum(s.link is None and (s.depth > 0 or s.num_speculative_tokens == 0) for s in sequences)
