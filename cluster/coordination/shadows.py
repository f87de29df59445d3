"""Sequences that are drafted for while nothing is speculated on, so that it is seen when it would pay again.

What is never tried is never known. A *shadow's* proposals cost the target nothing: they are compared with the tokens
that it decodes plainly. There are a few at a time, drafted for seldom, and none while somebody gets drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cluster.coordination.sequence import Round, SpeculativeSequence

SHADOW_DEPTH = 3
_MAX_SHADOWS = 2
_SHARE = 0.01  # of its draft worker's time, for which a shadow may keep it busy
_WEIGHT = 2  # rounds that one of a shadow stands for: so few must outweigh what was counted while all had some
_PAUSE_SECONDS = 0.25  # between two proposals for a shadow, while nothing is known of the draft's speed


class Shadows:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._may_ask_at: dict[SpeculativeSequence, float] = {}

    def __bool__(self) -> bool:
        return bool(self._may_ask_at)

    def __iter__(self) -> Iterator[SpeculativeSequence]:
        return iter(self._may_ask_at)

    def appoint(self, decoding: Sequence[SpeculativeSequence]) -> None:
        """Sequences that are open already come first: opening one costs its draft worker a prefill."""
        for sequence in sorted(decoding, key=lambda s: s.link is None):
            if len(self._may_ask_at) >= _MAX_SHADOWS:
                return
            if sequence.num_speculative_tokens is None and sequence not in self._may_ask_at:
                self._may_ask_at[sequence] = 0.0
                sequence.shadowed(is_shadow=True)

    def dismiss(self, sequence: SpeculativeSequence) -> None:
        self._may_ask_at.pop(sequence, None)
        sequence.shadowed(is_shadow=False)

    def dismiss_all(self) -> None:
        for sequence in tuple(self._may_ask_at):
            self.dismiss(sequence)

    def wanted(self, sequence: SpeculativeSequence, now: float) -> int:
        """How many draft tokens to ask for now that the shadow `sequence` has committed; mostly none."""
        if sequence.proposal is not None or now < self._may_ask_at[sequence]:
            return 0
        assert sequence.link is not None
        costs, pause = sequence.link.costs, _PAUSE_SECONDS
        if costs.is_known:
            pause = (costs.proposal_seconds(SHADOW_DEPTH, 1) - costs.round_trip_seconds) / _SHARE
        self._may_ask_at[sequence] = now + pause
        return SHADOW_DEPTH

    def judge(self, rounds: Sequence[Round]) -> bool:
        """Judges the shadows among `rounds`. Returns whether drafts of one were verified."""
        has_verified = False
        for sequence, drafts, _ in rounds:
            if sequence.is_shadow:
                has_verified = has_verified or bool(drafts.token_ids)
                self.judge_one(sequence)
        return has_verified

    def judge_one(self, sequence: SpeculativeSequence) -> None:
        """Compares a shadow's proposal with the tokens committed since, as soon as they decide about all of it."""
        proposal = sequence.proposal
        if proposal is None or sequence.acceptance is None:
            return
        since = sequence.token_ids[proposal.base :]
        num_accepted = 0
        for draft, token in zip(proposal.token_ids, since, strict=False):
            if draft != token:
                break
            num_accepted += 1
        if num_accepted < min(len(since), len(proposal.token_ids)) or len(since) >= len(proposal.token_ids):
            for _ in range(_WEIGHT):
                sequence.acceptance.observe(len(proposal.token_ids), num_accepted)
            sequence.judged()
