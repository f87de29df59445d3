"""Whether, how long and for whose proposals a step waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np

from cluster.coordination.balancer import LinkBalancer
from cluster.coordination.depths import DepthPlanner
from cluster.coordination.sequence import ActiveLink, SpeculativeSequence
from cluster.coordination.stats import CoordinatorStats
from cluster.speculation.costs import LearnedCurve

_WORTH_A_SPLIT = 0.1  # of a step: a shorter wait is not worth thinking about
_HARMLESS_WAIT = 0.02  # of a step: so much later, sequences that nobody drafts for are as fast as ever


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

    def wait(self, decoding: Sequence[SpeculativeSequence]) -> Collection[SpeculativeSequence]:
        """Waits until the proposals of `decoding` that are awaited are here, at most the draft timeout each.

        Returns those that the next step had better leave out: the others are worth more than the wait.
        """
        awaited = [s for s in decoding if s.awaited_since is not None and not s.is_late and s.depth > 0]
        if any(s.awaited_since is None or s.has_answered for s in decoding):
            # Drafters of new sequences still compute the tokens that these were opened with: others do not wait.
            for sequence in awaited:
                if not sequence.has_answered:
                    sequence.gave_up()
            awaited = [s for s in awaited if s.has_answered]
        for link in {s.link for s in decoding if s.is_late} - {s.link for s in awaited}:
            if link is not None:
                link.went_without()
        if not awaited:
            self._learn((), 0.0)
            return ()
        now = started_at = self._clock()
        if len(awaited) < len(decoding):
            to_wait = self._seconds_to_wait(awaited, now)
            if self.should_not_wait(_num_without_drafter(decoding), awaited, to_wait):
                self._learn((), 0.0)
                return ()
            ready = [s for s in decoding if not (s.depth > 0 and s.is_awaited)]
            if self.should_go_on_without(ready, awaited, to_wait):
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
        self._stats.wait_seconds += now - started_at
        return ()

    def wait_for_shadows(self, decoding: Sequence[SpeculativeSequence]) -> None:
        """Has proposals of shadows made that were asked for, where drafts are made in turn.

        With a turn a step they would come when the tokens that they are for are committed. At most the draft timeout.
        """
        deadline = self._clock() + self._timeout
        while any(s.is_shadow and s.is_awaited and s.proposal is None for s in decoding) and self._clock() < deadline:
            self._take_events(deadline - self._clock())

    def should_not_wait(self, num_plain: int, awaited: Sequence[SpeculativeSequence], seconds_to_wait: float) -> bool:
        """Whether the next step should be of all, with the proposals that are here, as most would wait for nothing.

        By tokens a second of all it would nearly always wait: the `num_plain` without a drafter lose a part of
        their speed, the others would lose more of theirs. But they are the many, and speculation must not slow them
        down. The proposals that come too late are of use to the step after, as far as they still fit.
        """
        if num_plain <= len(awaited) or not self._knows_steps:
            return False
        num_rows = num_plain + sum(1 + sequence.depth for sequence in awaited)
        return slows_others(seconds_to_wait, self._planner.step_seconds.seconds(num_rows))

    def should_go_on_without(
        self,
        ready: Sequence[SpeculativeSequence],
        awaited: Sequence[SpeculativeSequence],
        seconds_to_wait: float,
    ) -> bool:
        """Whether the next step should be of `ready` alone, while the proposals of `awaited` are on their way.

        They then come while the target computes, and two cohorts alternate. The other choice is to wait and run all
        in one step; what decides is the tokens committed a second.
        """
        if not ready or not self._knows_steps or self._drafts_in_turn:
            return False
        rows_ready = sum(1 + self._planner.verified_depth(s) for s in ready)
        rows_awaited = sum(1 + s.depth for s in awaited)
        tokens_ready = sum(s.expected_tokens for s in ready)
        tokens = tokens_ready + sum(s.expected_tokens for s in awaited)
        steps = self._planner.step_seconds
        return pays_alone(steps, (rows_ready, rows_ready + rows_awaited), (tokens_ready, tokens), seconds_to_wait)

    @property
    def _knows_steps(self) -> bool:
        """Whether waits can be weighed against steps: only where the controller has their times measured."""
        return self._planner.needs.measurements and self._planner.step_seconds.is_known

    def _seconds_to_wait(self, awaited: Sequence[SpeculativeSequence], now: float) -> float:
        """Until the last proposal of `awaited` is here."""
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

    def _learn(self, still_awaited: Collection[ActiveLink | None], waited: float) -> None:
        """The step waited so long for the proposals of all links but those."""
        for link in self._balancer.active.values():
            if link not in still_awaited:
                link.waited(waited)


def slows_others(seconds_to_wait: float, step_seconds: float) -> bool:
    """Whether a wait is felt by those that wait for nothing, in a step that takes so long."""
    return seconds_to_wait > _HARMLESS_WAIT * step_seconds


def pays_alone(steps: LearnedCurve, rows: tuple[int, int], tokens: tuple[float, float], seconds_to_wait: float) -> bool:
    """Whether a step of those that are ready commits more tokens a second than one of all, after a wait.

    `rows` and expected `tokens` are those of the former and of the latter.
    """
    alone, both = steps.at(np.array(rows))
    if seconds_to_wait < _WORTH_A_SPLIT * alone:
        return False
    return bool(tokens[0] / alone > tokens[1] / (both + seconds_to_wait))


def _num_without_drafter(sequences: Sequence[SpeculativeSequence]) -> int:
    """Those for which there is no room, or that asked for k = 0. A plan that gives a sequence nothing has weighed
    its time already."""
    return sum(s.link is None and (s.depth > 0 or s.num_speculative_tokens == 0) for s in sequences)
