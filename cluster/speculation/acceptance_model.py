"""Predicts the share of drafts that a target will accept, from its earlier choices.

Acceptance is measured by position, because deeper drafts are accepted less often. The rates of a position are shared by
all sequences of a kind, over a sliding window of rounds. A sequence's own history is short, so it only adds a factor on
these rates.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.speculation.tuning import INITIAL_RATE, KEEP, KIND_WIDTH, PRIOR, WINDOW

FloatArray = npt.NDArray[np.float64]


class PositionRates:
    """Acceptance rates by position: the rate of draft j, given that all drafts before it were accepted.

    Reading `rates` includes the rounds observed since the last read.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.expected: list[float] = []  # expected accepted drafts, by number of tested drafts; updated with `rates`
        self._rates: list[float] = []
        # The first position begins at the assumed rate, whose weight fades like that of tests.
        self._tested = [PRIOR, *[0.0] * max_depth][:max_depth]
        self._accepted = [PRIOR * INITIAL_RATE, *[0.0] * max_depth][:max_depth]
        # Rounds since `rates` was last read, by the number of tested drafts and by the number of accepted drafts.
        self._rounds_tested = [0] * (max_depth + 1)
        self._rounds_accepted = [0] * (max_depth + 1)
        self._make_rates()

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Counts a round: the target accepted the first `num_accepted` of `num_drafts` drafts and rejected the next."""
        self._rounds_tested[num_accepted + (num_accepted < num_drafts)] += 1
        self._rounds_accepted[num_accepted] += 1

    @property
    def num_tests(self) -> float:
        """Weight of the remembered tests of the first position, including the weight of the assumed rate."""
        self._take_in()
        return self._tested[0] if self._tested else 0.0

    def remember(self, most_tests: float) -> None:
        """Limits the weight of each position's tests to `most_tests`; keeps the rates."""
        for position, tested in enumerate(self._tested):
            if tested > most_tests:
                self._accepted[position] *= most_tests / tested
                self._tested[position] = most_tests

    def successor(self) -> PositionRates:
        """Returns the rates that another version of the draft begins with: these, with the weight of assumptions."""
        self._take_in()
        successor = copy.deepcopy(self)
        successor.remember(PRIOR)
        successor._make_rates()
        return successor

    @property
    def rates(self) -> list[float]:
        """Rates by position; a position with few tests is assumed to be like the previous position."""
        self._take_in()
        return self._rates

    def _take_in(self) -> None:
        if not any(self._rounds_tested):
            return
        tested = accepted = 0
        for position in reversed(range(self.max_depth)):
            tested += self._rounds_tested[position + 1]
            accepted += self._rounds_accepted[position + 1]
            self._tested[position] += tested
            self._accepted[position] += accepted
        self._rounds_tested = [0] * (self.max_depth + 1)
        self._rounds_accepted = [0] * (self.max_depth + 1)
        self.remember(WINDOW)
        self._make_rates()

    def _make_rates(self) -> None:
        self._rates = []
        for position, (tested, accepted) in enumerate(zip(self._tested, self._accepted, strict=True)):
            if position > 0:
                tested += PRIOR
                accepted += PRIOR * self._rates[-1]
            self._rates.append(accepted / tested)
        self.expected = [0.0, *itertools.accumulate(self._rates)]


@dataclass(slots=True)
class SequenceAcceptance:
    """Acceptance of one sequence, as a factor on the `shared` rates."""

    shared: PositionRates
    # Sums over the sequence's own drafts in a sliding window. `factor` adds `PRIOR` to both.
    _accepted: float = 0.0
    _expected: float = 0.0

    @property
    def factor(self) -> float:
        """Accepted drafts, divided by the number that the shared rates predicted."""
        return (PRIOR + self._accepted) / (PRIOR + self._expected)

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Counts a round in this sequence's sums and in the shared rates."""
        shared = self.shared
        num_drafts = min(num_drafts, shared.max_depth)
        num_accepted = min(num_accepted, num_drafts)
        num_tested = num_accepted + (num_accepted < num_drafts)
        shared.observe(num_drafts, num_accepted)
        keep = KEEP**num_tested
        self._accepted = keep * self._accepted + num_accepted
        self._expected = keep * self._expected + shared.expected[num_tested]

    def survival(self) -> list[float]:
        """Returns the probability, for each depth, that a draft at that depth is accepted.

        It never rises with depth.
        """
        rates, factor = self.shared.rates, self.factor
        return list(itertools.accumulate([min(rate * factor, KEEP) for rate in rates], operator.mul))


def kind_of(temperature: float) -> float:
    """Returns `temperature` rounded to a multiple of `KIND_WIDTH`.

    Sequences with the same rounded temperature share what is learned about acceptance."""
    return KIND_WIDTH * round(temperature / KIND_WIDTH)


def own_rates(sequences: Sequence[SequenceAcceptance]) -> FloatArray:
    """Returns each sequence's acceptance by position, [sequences, depths], including all observed rounds."""
    shared = list({id(sequence.shared): sequence.shared for sequence in sequences}.values())
    row_of = {id(kind): row for row, kind in enumerate(shared)}
    rates = np.array([kind.rates for kind in shared])[[row_of[id(sequence.shared)] for sequence in sequences]]
    factors = np.array([sequence.factor for sequence in sequences])
    scaled: FloatArray = np.minimum(rates * factors[:, None], KEEP)  # a window cannot show that drafts are certain
    return scaled
