"""What share of drafts a target will confirm, learned from what it confirmed.

A sequence's own history is short, so it only scales what all sequences of its kind show: acceptance by position
(deeper drafts are confirmed less often), over a window that forgets.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_INITIAL_RATE = 0.7
_INITIAL_WEIGHT = 4.0  # tests that the position before, or the initial rate, stands for
_WINDOW = 200.0  # tests of a position that are remembered, about
_SEQUENCE_WEIGHT = 8.0  # tests that the shared rates stand for in a sequence's own
_SEQUENCE_WINDOW = 48.0
_MAX_RATE = 0.995


class PositionRates:
    """How often the draft at position j of a proposal is confirmed when all before it were."""

    def __init__(self, max_depth: int) -> None:
        self._tested = [0.0] * max_depth
        self._accepted = [0.0] * max_depth
        self._rates: list[float] | None = None

    @property
    def rates(self) -> list[float]:
        """One for each position; a position that was hardly tested is taken to be as good as the one before."""
        if self._rates is None:
            before, rates = _INITIAL_RATE, []
            for tested, accepted in zip(self._tested, self._accepted, strict=True):
                before = (accepted + _INITIAL_WEIGHT * before) / (tested + _INITIAL_WEIGHT)
                rates.append(before)
            self._rates = rates
        return self._rates

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Of `num_drafts` drafts the first `num_accepted` were confirmed, and the next was not, if there was one."""
        tested, accepted = self._tested, self._accepted
        for position in range(min(num_accepted + 1, num_drafts, len(tested))):
            if tested[position] >= _WINDOW:
                keep = 1.0 - 1.0 / _WINDOW
                tested[position] *= keep
                accepted[position] *= keep
            tested[position] += 1.0
            if position < num_accepted:
                accepted[position] += 1.0
        self._rates = None


@dataclass(slots=True)
class SequenceAcceptance:
    """One sequence's acceptance, in proportion to `shared`."""

    shared: PositionRates
    _accepted: float = field(default=_SEQUENCE_WEIGHT)
    _expected: float = field(default=_SEQUENCE_WEIGHT)
    _tested: float = 0.0

    @property
    def factor(self) -> float:
        """Confirmed drafts over those that the shared rates would have let one expect."""
        return self._accepted / self._expected

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Takes in one round; also teaches the shared rates."""
        if num_drafts == 0:
            return
        rates = self.shared.rates
        num_tested = min(num_accepted + 1, num_drafts, len(rates))
        if self._tested >= _SEQUENCE_WINDOW:
            keep = 1.0 - num_tested / _SEQUENCE_WINDOW
            self._tested *= keep
            # The shared rates' own weight does not fade.
            self._accepted = _SEQUENCE_WEIGHT + (self._accepted - _SEQUENCE_WEIGHT) * keep
            self._expected = _SEQUENCE_WEIGHT + (self._expected - _SEQUENCE_WEIGHT) * keep
        self._tested += num_tested
        self._accepted += min(num_accepted, num_tested)
        self._expected += sum(rates[:num_tested])
        self.shared.observe(num_drafts, num_accepted)

    def survival(self) -> list[float]:
        """For each depth, the probability that a draft so deep is committed; never rises."""
        factor, alive, survival = self.factor, 1.0, []
        for rate in self.shared.rates:
            alive *= min(rate * factor, _MAX_RATE)
            survival.append(alive)
        return survival
