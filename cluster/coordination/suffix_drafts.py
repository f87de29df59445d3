"""Drafts from earlier text, for sequences that a draft pool may draft for too.

A sequence verifies the suffix index's drafts in place of its drafter's if more of them are expected to be accepted. Its
drafter is then asked for none, and hears what was committed when it is asked again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.coordination.depths import DepthPlanner
from cluster.coordination.sequence import Round, SpeculativeSequence
from cluster.speculation.acceptance_model import PositionRates, SequenceAcceptance
from cluster.speculation.drafts import NO_DRAFTS, Drafts, num_useful_drafts
from cluster.speculation.suffix_index import Match, SuffixIndex, Text, following
from cluster.speculation.tuning import LEAST_GAIN, PRIOR, RECENT, WINDOW
from cluster.telemetry.metrics import Reading

_NEW_TOKENS = 1024  # most that a step takes in: 0.3 µs each, or 1.7 where pages of the tables are new


@dataclass(eq=False, slots=True)
class _Followed:
    """A sequence with its text and its next drafts."""

    text: Text
    acceptance: SequenceAcceptance  # shared with all drafts after runs of the same length
    drafts: Drafts
    num_followed: int = 0  # tokens that `drafts` follow
    expected: float = 0.0  # accepted drafts


class SuffixDrafts:
    """For the engine's thread, but for `readings`."""

    def __init__(self, planner: DepthPlanner, num_bytes: int) -> None:
        self._planner = planner
        self._index = SuffixIndex.of_bytes(num_bytes)
        self._followed: dict[SpeculativeSequence, _Followed] = {}
        self._depths: dict[PositionRates, int] = {}  # of the step that is proposed for
        self._num_matches = 0
        self._num_drafted = self._num_accepted = 0

    def take_in(self, sequences: Sequence[SpeculativeSequence]) -> None:
        """Takes in new tokens of `sequences`, as many as a step may."""
        room = _NEW_TOKENS
        news: list[tuple[Text, int]] = []
        for sequence in sequences:
            followed = self._followed.get(sequence)
            if followed is None:
                followed = self._follow(sequence)
            num_new = min(room, len(sequence.token_ids) - followed.text.num_known)
            if num_new > 0:
                room -= num_new
                news.append((followed.text, followed.text.num_known + num_new))
        self._index.take_in(news)

    def propose(self, sequences: Sequence[SpeculativeSequence]) -> None:
        """Looks up drafts that follow the tokens of `sequences`, which have just been committed."""
        asking = [one for one in sequences if one in self._followed and one.num_speculative_tokens != 0]
        matches = self._index.find([self._followed[one].text for one in asking])
        self._depths.clear()
        room = self._planner.steps.room_for_drafts(len(sequences)) - sum([sequence.depth for sequence in sequences])
        for sequence, match in zip(asking, matches, strict=True):
            followed = self._followed[sequence]
            followed.drafts, followed.expected = NO_DRAFTS, 0.0
            if match is not None:
                self._propose(sequence, followed, match, max(0, room) + sequence.depth)
                room -= max(0, len(followed.drafts) - sequence.depth)

    def drafts_of(self, sequence: SpeculativeSequence) -> Drafts:
        """Returns the drafts that the next step of `sequence` should verify; none if its drafter's are better."""
        followed = self._followed.get(sequence)
        if followed is None or not followed.drafts or followed.num_followed != len(sequence.token_ids):
            return NO_DRAFTS
        from_drafter = sequence.expected_tokens - 1.0 if sequence.link is not None and sequence.depth else 0.0
        return followed.drafts if followed.expected > from_drafter else NO_DRAFTS

    def observe(self, ended: Round) -> None:
        """Learns from a round that verified the last drafts of its sequence."""
        followed = self._followed.get(ended.sequence)
        if followed is not None and ended.drafts:
            num_drafts = len(ended.drafts)  # a chain, after which a grammar may have more
            num_accepted = min(num_drafts, len(ended.chosen) - 1)
            followed.acceptance.observe(num_drafts, num_accepted)
            self._num_drafted += num_drafts
            self._num_accepted += num_accepted

    def close(self, sequence: SpeculativeSequence) -> None:
        followed = self._followed.pop(sequence, None)
        if followed is not None:
            self._index.end(followed.text)

    def readings(self) -> Iterator[Reading]:
        """Any thread."""
        drafted, accepted = "Drafts of the suffix index that were verified.", "Drafts of the suffix index accepted."
        kept = "Tokens of ended sequences that the suffix index keeps."
        yield Reading("outrider_suffix_draft_tokens", drafted, self._num_drafted, is_counter=True)
        yield Reading("outrider_suffix_accepted_tokens", accepted, self._num_accepted, is_counter=True)
        yield Reading("outrider_suffix_kept_tokens", kept, self._index.num_kept_tokens)

    def _follow(self, sequence: SpeculativeSequence) -> _Followed:
        text = self._index.begin(sequence.owner + sequence.cache_root, sequence.token_ids)
        followed = _Followed(text, SequenceAcceptance(self._planner.rates("", sequence.params.temperature)), NO_DRAFTS)
        self._followed[sequence] = followed
        return followed

    def _propose(self, sequence: SpeculativeSequence, followed: _Followed, match: Match, room: int) -> None:
        """Proposes as many tokens as pay.

        The first matches of a run's length, and one in `WINDOW` later ones, are tried whatever is expected of them.
        """
        planner, num_tokens = self._planner, len(sequence.token_ids)
        may_exceed_plan = sequence.is_automatic and planner.measures and math.isinf(planner.spare_seconds)
        most = planner.max_depth if may_exceed_plan else sequence.depth
        rates = followed.acceptance.shared = planner.rates(f"suffix {match.run}", sequence.params.temperature)
        survival = followed.acceptance.survival()  # which counts the rounds since the last one
        worth = self._worth(rates) if planner.measures else most
        self._num_matches += 1
        is_trial = rates.num_tests < PRIOR + RECENT or self._num_matches % WINDOW == 0
        number = num_useful_drafts(min(most, room, max(worth, is_trial)), num_tokens, sequence.max_len)
        followed.drafts, followed.num_followed = Drafts(following(match, followed.text, number)), num_tokens
        followed.expected = math.inf if is_trial else sum(survival[:number])

    def _worth(self, rates: PositionRates) -> int:
        """Returns the depth with the most tokens per second if all sequences had drafts of `rates`; 0: none pays."""
        planner = self._planner
        if rates not in self._depths and planner.steps.is_known:
            survival = np.asarray(np.cumprod(rates.rates), np.float64)
            speed = planner.speed(planner.num_planned_rows)
            by_depth = speed.by_depth(survival, np.zeros(len(survival)))
            best = int(by_depth.argmax())
            self._depths[rates] = best + 1 if by_depth[best] > LEAST_GAIN * speed.plain else 0
        return self._depths.get(rates, 0)
