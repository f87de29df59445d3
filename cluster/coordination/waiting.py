"""Decides whether a step waits, how long, and for which sequences' proposals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from cluster.coordination.balancer import LinkBalancer
from cluster.coordination.depths import DepthPlanner
from cluster.coordination.sequence import ActiveLink, SpeculativeSequence
from cluster.coordination.stats import CoordinatorStats

_LEAST_WAIT_SECONDS = 1e-4  # minimum time between two checks of whether waiting still pays
# Share of the tokens that a wait adds which is lost without the wait; late drafts are used in the next step as far as
# they fit. A 1B draft in INT4 for 8 streams on an A10G: 899 tokens/s counting all of them, 951 counting half.
_LOST_SHARE = 0.5


class Waits:
    """The part of a coordinator that waits for proposals; shares the coordinator's other parts.

    `take_events(seconds)` handles the links' events, waiting up to `seconds`.
    """

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
        for sequence in decoding:
            runs_ahead = sequence.window > sequence.num_levels > 0
            if sequence.link is not None and runs_ahead and sequence.depth > 0 and sequence.has_answered:
                sequence.link.num_ready.append(min(sequence.num_ready, sequence.num_levels))
                sequence.link.num_asked.append(sequence.num_levels)
        awaited = [s for s in decoding if s.is_awaited and s.depth > 0]
        if any(s.awaited_since is None or s.has_answered for s in decoding):
            # Drafters of new sequences are still computing the prompts: other sequences do not wait for these.
            for sequence in awaited:
                if not sequence.has_answered:
                    sequence.gave_up()
            awaited = [s for s in awaited if s.has_answered]
        now = started_at = self._clock()
        lacking = self._lacking(awaited)
        while awaited:
            is_probe = self._planner.probe in awaited  # the wait is part of what the step may cost
            seconds = self._seconds_to_wait(awaited, now)
            if not is_probe and not self.pays(decoding, awaited, seconds):
                for link, lacked in lacking.items():
                    link.costs.observe_wait(now - started_at + seconds, *lacked)
                break
            deadline = min([s.awaited_since for s in awaited if s.awaited_since is not None]) + self._timeout
            if now >= deadline:
                self._give_up(awaited, now)
            else:
                self._take_events(min(deadline - now, max(seconds, _LEAST_WAIT_SECONDS)))
                now = self._clock()
            awaited = [s for s in awaited if s.is_awaited]
            # A probe's drafter has more to catch up with than one that drafts all the time, so its times do not count.
            for link in lacking.keys() - {s.link for s in awaited} if self._planner.has_drafts else ():
                link.costs.observe_wait(now - started_at, *lacking.pop(link))
        self._stats.wait_seconds += now - started_at

    @staticmethod
    def _lacking(awaited: Sequence[SpeculativeSequence]) -> dict[ActiveLink, tuple[int, int]]:
        """Returns by link the most levels that a sequence of `awaited` lacks, and the number of these sequences."""
        lacking: dict[ActiveLink, tuple[int, int]] = {}
        for sequence in awaited:
            if sequence.link is not None:
                levels, number = lacking.get(sequence.link, (0, 0))
                lacking[sequence.link] = max(levels, sequence.num_levels - sequence.num_ready), number + 1
        return lacking

    def pays(
        self,
        decoding: Sequence[SpeculativeSequence],
        awaited: Collection[SpeculativeSequence],
        seconds_to_wait: float,
    ) -> bool:
        """Returns True if a step after the wait should commit more tokens per second than a step now.

        A step now uses the drafts of `awaited` that have arrived. Also returns True if the step waits for these in any
        case.

        If drafters run ahead, only a share `_LOST_SHARE` of the tokens that the wait adds counts: drafts that arrive
        while the step runs can be used in the next one.
        """
        steps = self._planner.steps
        if not (self._planner.measures and steps.is_known):
            return True
        if len(awaited) == len(decoding) and all(s.num_speculative_tokens for s in decoding):
            return True  # every request has its own number of drafts, and none has its proposal
        ready = [self._num_ready(s) for s in decoding]
        now_rows = len(decoding) + sum(ready)
        at_once = steps.curve.seconds(now_rows)
        together = steps.curve.seconds(now_rows + sum(s.depth - self._num_ready(s) for s in awaited))
        tokens = sum(s.expected_of(number) for s, number in zip(decoding, ready, strict=True))
        more = sum(self._lost_tokens(sequence) for sequence in awaited)
        return (tokens + more) / (together + seconds_to_wait) >= tokens / at_once

    def _lost_tokens(self, sequence: SpeculativeSequence) -> float:
        """Returns the expected tokens of `sequence` that are lost if the step does not wait."""
        tokens = sequence.expected_tokens - sequence.expected_of(self._num_ready(sequence))
        return _LOST_SHARE * tokens if self._planner.runs_ahead else tokens

    def _num_ready(self, sequence: SpeculativeSequence) -> int:
        return min(sequence.num_ready, self._planner.verified_depth(sequence))

    def _seconds_to_wait(self, awaited: Sequence[SpeculativeSequence], now: float) -> float:
        """Returns the predicted seconds until the last proposal of `awaited` comes.

        An overdue proposal is expected to take as long again as it is overdue.
        """
        batches = Counter(s.link for s in awaited)
        takes: dict[tuple[ActiveLink, int], float] = {}
        to_wait = 0.0
        for sequence in awaited:
            assert sequence.link is not None
            assert sequence.awaited_since is not None
            kind = sequence.link, sequence.num_levels
            if kind not in takes:
                takes[kind] = sequence.link.costs.proposal_seconds(sequence.num_levels, batches[sequence.link])
            asked_at = now if self._drafts_in_turn else sequence.awaited_since
            to_wait = max(to_wait, abs(asked_at + takes[kind] - now))
        return to_wait

    def _give_up(self, awaited: Sequence[SpeculativeSequence], now: float) -> None:
        """Marks the proposals of `awaited` whose timeout has passed as late: no step waits for them any more."""
        for sequence in awaited:
            if sequence.awaited_since is not None and now >= sequence.awaited_since + self._timeout:
                sequence.gave_up()
                self._stats.num_late_rounds += 1
                if sequence.link is not None:
                    sequence.link.was_late(now)
