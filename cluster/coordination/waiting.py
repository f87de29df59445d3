"""Decides whether a step waits for proposals, for which sequences, and for how long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from cluster.coordination.balancer import LinkBalancer
from cluster.coordination.depths import DepthPlanner
from cluster.coordination.sequence import ActiveLink, SpeculativeSequence
from cluster.coordination.stats import CoordinatorStats
from cluster.speculation.tuning import LOST_SHARE

_LEAST_WAIT_SECONDS = 1e-4  # minimum time between two checks of whether waiting still pays


class Waits:
    """Waits for a coordinator's proposals. The coordinator shares its planner, balancer and stats.

    `take_events(seconds)` waits up to `seconds` for the first event of the links, and handles all events.
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
        """`drafts_in_turn`: drafters compute only while a step waits, so a proposal's time starts with the wait."""
        self._planner = planner
        self._balancer = balancer
        self._stats = stats
        self._timeout = timeout_seconds
        self._clock = clock
        self._take_events = take_events
        self._drafts_in_turn = drafts_in_turn

    def wait(self, decoding: Sequence[SpeculativeSequence]) -> None:
        """Waits for the awaited proposals of `decoding`, while that pays, and at most the draft timeout for each."""
        for sequence in decoding:
            runs_ahead = sequence.window > sequence.num_levels > 0
            if sequence.link is not None and runs_ahead and sequence.depth > 0 and sequence.has_answered:
                sequence.link.num_ready.append(sequence.num_ready)
                sequence.link.num_asked.append(sequence.num_levels)
        awaited = [s for s in decoding if s.is_awaited and self._planner.verified_depth(s) > 0]
        if any(s.awaited_since is None or s.has_answered for s in decoding):
            # Drafters of new sequences are still computing the prompts: the step does not wait for these proposals.
            for sequence in awaited:
                if not sequence.has_answered:
                    sequence.gave_up()
            awaited = [s for s in awaited if s.has_answered]
        now = started_at = self._clock()
        lacking = self._lacking(awaited)
        while awaited:
            is_probe = (
                self._planner.probe in awaited
            )  # a probe always waits: `DepthPlanner` counts the wait as its cost
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
            # A probe's drafter must first catch up with more tokens than usual, so its times do not count.
            for link in lacking.keys() - {s.link for s in awaited} if self._planner.has_drafts else ():
                link.costs.observe_wait(now - started_at, *lacking.pop(link))
        self._stats.wait_seconds += now - started_at

    @staticmethod
    def _lacking(awaited: Sequence[SpeculativeSequence]) -> dict[ActiveLink, tuple[int, int]]:
        """Returns for each link the maximum number of levels that a sequence lacks, and its number of sequences."""
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
        """Returns True if waiting should not reduce the committed tokens per second.

        A step now would use the drafts of `awaited` that have arrived. Returns True without a prediction if nothing is
        measured, if all sequences are awaited and all their requests set a number of drafts, or if depths are fixed and
        drafters do not run ahead.

        Returns False while steps cannot keep up with prompts. If drafters run ahead, only a share `LOST_SHARE` of the
        tokens that the wait adds counts, because the next step can use drafts that arrive while this step runs.
        """
        steps = self._planner.steps
        if not (steps.is_known and (self._planner.measures or self._planner.runs_ahead)):
            return True
        if len(awaited) == len(decoding) and all(s.num_speculative_tokens for s in decoding):
            return True  # every request has its own number of drafts, and none has its proposal
        if self._planner.leaves_prompts_waiting:
            return False  # sequences that end sooner have no successor: prompts need the time
        missing = set(awaited)
        rows, more_rows = len(decoding), 0
        tokens = lost_tokens = 0.0
        for sequence in decoding:
            depth = self._planner.verified_depth(sequence)
            num_ready = min(sequence.num_ready, depth)
            expected = sequence.expected_of(num_ready)
            rows += num_ready
            tokens += expected
            if sequence in missing:
                more_rows += depth - num_ready
                lost_tokens += sequence.expected_of(depth) - expected
        if self._planner.runs_ahead:
            lost_tokens *= LOST_SHARE
        at_once, together = steps.curve.seconds(rows), steps.curve.seconds(rows + more_rows)
        return (tokens + lost_tokens) / (together + seconds_to_wait) >= tokens / at_once

    def _seconds_to_wait(self, awaited: Sequence[SpeculativeSequence], now: float) -> float:
        """Returns the predicted seconds until the last proposal of `awaited` comes.

        A proposal that is overdue by some seconds is expected after the same number of seconds.
        """
        batches = Counter([s.link for s in awaited])
        to_wait = 0.0
        # Usually the step's sequences have the same number of levels, and were asked at the same time.
        for link, num_levels, awaited_since in {(s.link, s.num_levels, s.awaited_since) for s in awaited}:
            assert link is not None
            assert awaited_since is not None
            asked_at = now if self._drafts_in_turn else awaited_since
            seconds = link.costs.proposal_seconds(num_levels, batches[link])
            to_wait = max(to_wait, abs(asked_at + seconds - now))
        return to_wait

    def _give_up(self, awaited: Sequence[SpeculativeSequence], now: float) -> None:
        """Marks the proposals of `awaited` whose timeout has passed as late: no step waits for them any more."""
        for sequence in awaited:
            if sequence.awaited_since is not None and now >= sequence.awaited_since + self._timeout:
                sequence.gave_up()
                self._stats.num_late_rounds += 1
                if sequence.link is not None:
                    sequence.link.was_late(now)
