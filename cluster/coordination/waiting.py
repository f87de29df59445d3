"""Decides whether, how long and for whose proposals a step waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np

from cluster.coordination.balancer import LinkBalancer
from cluster.coordination.depths import DepthPlanner
from cluster.coordination.sequence import ActiveLink, SpeculativeSequence
from cluster.coordination.stats import CoordinatorStats

_SHORT_WAIT = 0.1  # of the step: the prediction of a shorter wait is no better than its length


class Waits:
    """Belongs to a coordinator, whose parts it is given; `take_events(seconds)` takes in what happens meanwhile."""

    def __init__(
        self,
        planner: DepthPlanner,
        balancer: LinkBalancer,
        stats: CoordinatorStats,
        timeout_seconds: float,
        clock: Callable[[], float],
        take_events: Callable[[float], None],
        *,
        drafts_in_turn: bool = False,
    ) -> None:
        """`drafts_in_turn`: drafters compute only while a step waits, so that no wait passes while the target works."""
        self._planner = planner
        self._balancer = balancer
        self._stats = stats
        self._timeout = timeout_seconds
        self._clock = clock
        self._take_events = take_events
        self._drafts_in_turn = drafts_in_turn

    def wait(self, decoding: Sequence[SpeculativeSequence]) -> None:
        """Waits until the awaited proposals of `decoding` have come, at most the draft timeout each, if that pays."""
        awaited = [s for s in decoding if s.is_awaited and s.depth > 0]
        if any(s.awaited_since is None or s.has_answered for s in decoding):
            # Drafters of new sequences still compute the tokens that these were opened with: others do not wait.
            for sequence in awaited:
                if not sequence.has_answered:
                    sequence.gave_up()
            awaited = [s for s in awaited if s.has_answered]
        for link in {s.link for s in decoding if s.is_late} - {s.link for s in awaited}:
            if link is not None:
                link.went_without()
        now = started_at = self._clock()
        if awaited and len(awaited) < len(decoding):
            ready = [s for s in decoding if not (s.depth > 0 and s.is_awaited)]
            is_probe = self._planner.probe in awaited  # its wait is part of what it may cost
            if not is_probe and not self.pays(ready, awaited, self._seconds_to_wait(awaited, now)):
                awaited = []
        if not awaited:
            self._learn((), 0.0)
        while awaited:
            deadline = min([s.awaited_since for s in awaited if s.awaited_since is not None]) + self._timeout
            if now >= deadline:
                self._give_up(awaited, now)
            else:
                self._take_events(deadline - now)
                now = self._clock()
            awaited = [s for s in awaited if s.is_awaited]
            self._learn({s.link for s in awaited}, now - started_at)
        self._stats.wait_seconds += now - started_at

    def pays(
        self, ready: Sequence[SpeculativeSequence], awaited: Sequence[SpeculativeSequence], seconds_to_wait: float
    ) -> bool:
        """Returns True if a step of all sequences after the wait is expected to commit more tokens per second than a
        step at once, in which each of `awaited` has one row. Leaving `awaited` out of the step never commits more."""
        steps = self._planner.steps
        if not (self._planner.measures and steps.is_known):
            return True
        rows = len(ready) + len(awaited) + sum(self._planner.verified_depth(s) for s in ready)
        at_once, together = steps.curve.at(np.array([rows, rows + sum(s.depth for s in awaited)]))
        if seconds_to_wait < _SHORT_WAIT * at_once:
            return True
        tokens = sum(s.expected_tokens for s in ready)
        with_drafts = tokens + sum(s.expected_tokens for s in awaited)
        return bool(with_drafts / (together + seconds_to_wait) >= (tokens + len(awaited)) / at_once)

    def _seconds_to_wait(self, awaited: Sequence[SpeculativeSequence], now: float) -> float:
        """Predicted seconds until the last proposal of `awaited` comes."""
        batches = Counter(s.link for s in awaited)
        to_wait = 0.0
        for sequence in awaited:
            assert sequence.link is not None
            assert sequence.awaited_since is not None
            takes = sequence.link.costs.proposal_seconds(sequence.num_levels, batches[sequence.link])
            asked_at = now if self._drafts_in_turn else sequence.awaited_since
            to_wait = max(to_wait, asked_at + takes - now)
        return to_wait

    def _give_up(self, awaited: Sequence[SpeculativeSequence], now: float) -> None:
        """No step waits any more for those of `awaited` whose time is over."""
        for sequence in awaited:
            if sequence.awaited_since is not None and now >= sequence.awaited_since + self._timeout:
                sequence.gave_up()
                self._stats.num_late_rounds += 1
                if sequence.link is not None:
                    sequence.link.was_late(now)

    def _learn(self, still_awaited: Collection[ActiveLink | None], seconds: float) -> None:
        """The step waited `seconds` for the proposals of all links but `still_awaited`."""
        for link in self._balancer.active.values():
            if link not in still_awaited:
                if self._planner.has_drafts:
                    link.waited(seconds)
                else:  # a probe's drafter has more to catch up with than one that drafts all the time
                    link.went_without()
