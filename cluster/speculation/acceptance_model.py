"""What share of drafts a target will confirm, learned from what it confirmed.

A sequence's own history is short, so it only scales what all sequences of its kind show: acceptance by position
(deeper drafts are confirmed less often), over a window that forgets.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_INITIAL_RATE = 0.7
_INITIAL_WEIGHT = 4.0  # tests that the position before, or the initial rate, stands for
_WINDOW = 200.0  # tests of a position that are remembered, about
_SEQUENCE_WEIGHT = 8.0  # tests that the shared rates stand for in a sequence's own
_SEQUENCE_WINDOW = 48.0
_MAX_RATE = 0.995
_MAX_ROUNDS_TO_RENEW = 64


class PositionRates:
    """How often the draft at position j of a proposal is confirmed when all before it were.

    Rounds are collected as they come and made into rates after some dozen: many sequences have a round in every step.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self._tested = [0.0] * max_depth
        self._accepted = [0.0] * max_depth
        self._rounds: list[tuple[int, int]] = []  # (drafts, accepted), since the rates were made
        self._num_rounds_to_renew = 1
        self._num_rounds_ever = 0
        self._rates: list[float] = []
        self.expected: list[float] = []  # confirmed drafts, by how many were tested
        self._renew()

    @property
    def rates(self) -> list[float]:
        """One for each position; a position that was hardly tested is taken to be as good as the one before."""
        if self._rounds:
            self._renew()
        return self._rates

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Of `num_drafts` drafts the first `num_accepted` were confirmed, and the next was not, if there was one."""
        self.observe_rounds([(num_drafts, num_accepted)])

    def observe_rounds(self, rounds: Sequence[tuple[int, int]]) -> None:
        """Several, each as in `observe`."""
        self._rounds += rounds
        if len(self._rounds) >= self._num_rounds_to_renew:
            self._renew()

    def _renew(self) -> None:
        """Takes in the rounds since the last time, those with the same outcome at once."""
        tested, accepted = self._tested, self._accepted
        for (num_drafts, num_accepted), count in Counter(self._rounds).items():
            self._num_rounds_ever += count
            for position in range(min(num_accepted + 1, num_drafts, len(tested))):
                tested[position] += count
                if position < num_accepted:
                    accepted[position] += count
                if tested[position] > _WINDOW:
                    keep = _WINDOW / tested[position]
                    tested[position] *= keep
                    accepted[position] *= keep
        self._rounds.clear()
        self._num_rounds_to_renew = min(_MAX_ROUNDS_TO_RENEW, 1 + self._num_rounds_ever // 4)
        before, self._rates = _INITIAL_RATE, []
        for seen, confirmed in zip(tested, accepted, strict=True):
            before = (confirmed + _INITIAL_WEIGHT * before) / (seen + _INITIAL_WEIGHT)
            self._rates.append(before)
        self.expected = [0.0, *itertools.accumulate(self._rates)]


@dataclass(slots=True)
class SequenceAcceptance:
    """One sequence's acceptance, in proportion to `shared`."""

    shared: PositionRates
    # Of its own drafts, over a window; the weight of the shared rates is apart and does not fade.
    _accepted: float = 0.0
    _expected: float = 0.0
    _rounds: list[tuple[int, int]] = field(default_factory=list)  # (drafts, accepted), not yet among those

    @property
    def factor(self) -> float:
        """Confirmed drafts over those that the shared rates would have let one expect."""
        self.take_in()
        return (_SEQUENCE_WEIGHT + self._accepted) / (_SEQUENCE_WEIGHT + self._expected)

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Keeps one round until someone asks: there is one in every step, and a question in 16."""
        max_depth = self.shared.max_depth
        if num_drafts > max_depth:
            num_drafts, num_accepted = max_depth, min(num_accepted, max_depth)
        if num_drafts:
            self._rounds.append((num_drafts, num_accepted))

    def take_in(self) -> None:
        """Learns from the rounds that were kept; so do the shared rates."""
        if not self._rounds:
            return
        tested = [num_accepted + (num_accepted < num_drafts) for num_drafts, num_accepted in self._rounds]
        keep, expected = math.exp(-sum(tested) / _SEQUENCE_WINDOW), self.shared.expected
        self._accepted = keep * self._accepted + sum([num_accepted for _, num_accepted in self._rounds])
        self._expected = keep * self._expected + sum([expected[number] for number in tested])
        self.shared.observe_rounds(self._rounds)
        self._rounds.clear()

    def survival(self) -> list[float]:
        """For each depth, the probability that a draft so deep is committed; never rises."""
        survival: list[float] = survivals([self])[0].tolist()
        return survival


def survivals(sequences: Sequence[SequenceAcceptance]) -> FloatArray:
    """The survival of each, [sequences, depths]."""
    return np.asarray(np.cumprod(own_rates(sequences), axis=1))


def own_rates(sequences: Sequence[SequenceAcceptance]) -> FloatArray:
    """The rates of each by position, [sequences, depths]."""
    for sequence in sequences:
        sequence.take_in()  # of all, before the shared rates are looked at
    shared = list({id(sequence.shared): sequence.shared for sequence in sequences}.values())
    row_of = {id(rates): row for row, rates in enumerate(shared)}
    rates = np.array([kind.rates for kind in shared])[[row_of[id(sequence.shared)] for sequence in sequences]]
    factors = np.array([sequence.factor for sequence in sequences])
    scaled: FloatArray = np.minimum(rates * factors[:, None], _MAX_RATE)
    return scaled
