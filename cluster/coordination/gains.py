"""What each draft model of the pool would give, and what speculation gains now: for placing, and for whoever looks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from cluster.coordination.depths import DepthPlanner
from cluster.coordination.sequence import ActiveLink, SpeculativeSequence
from cluster.telemetry.metrics import Reading

_SECONDS = 1.0  # between two estimates
_STALE_SECONDS = 10.0  # after so long without a plan nothing is speculated on


class Gains:
    """Belongs to the engine's thread but for `readings`."""

    def __init__(self, planner: DepthPlanner, clock: Callable[[], float]) -> None:
        self._planner = planner
        self._clock = clock
        self._estimate_at = clock()
        self._planned_at = -_STALE_SECONDS
        self._gains: dict[str, float] = {}
        self._goodputs: dict[str, float] = {}

    def planned(self, planned: Sequence[SpeculativeSequence], links: Iterable[ActiveLink], num_rows: int) -> None:
        """`planned`, of the `num_rows` sequences of a step, have depths from now on; `links` are all that are up."""
        now = self._clock()
        if now < self._estimate_at or not self._planner.step_seconds.is_known:
            return
        self._estimate_at, self._planned_at = now + _SECONDS, now
        links = list(links)
        self._gains = dict.fromkeys([link.model for link in links], 1.0) | self._now(planned, num_rows)
        self._goodputs = self._possible(planned, links, num_rows)

    def _now(self, planned: Sequence[SpeculativeSequence], num_rows: int) -> dict[str, float]:
        """Tokens a second of the sequences that each model drafts for, over what they would have without any drafts."""
        costs = self._planner.step_costs(num_rows)
        drafted = [s for s in planned if s.link is not None and s.depth > 0]
        if not drafted:
            return {}
        depths: dict[ActiveLink, int] = {}
        for sequence in drafted:
            assert sequence.link is not None
            depths[sequence.link] = max(depths.get(sequence.link, 0), self._planner.planned_levels(sequence))
        batches = Counter(sequence.link for sequence in drafted)
        wait = max(
            float(link.costs.wait_seconds(np.array([depth]), np.array([batches[link]]))[0])
            for link, depth in depths.items()
        )
        num_drafts = sum(sequence.depth for sequence in drafted)
        num_tokens = costs.num_rows + sum(sequence.expected_tokens - 1.0 for sequence in drafted)
        step = costs.seconds(num_drafts, num_tokens) + wait
        # As the two kinds of plans have come true so far.
        slower = step * costs.plain_rate * self._planner.probing.handicap
        tokens: dict[str, list[float]] = {}
        for sequence in planned:
            if sequence.link is not None:
                expected = sequence.expected_tokens if sequence.depth > 0 else 1.0
                tokens.setdefault(sequence.link.model, []).append(expected)
        return {model: sum(expected) / len(expected) / slower for model, expected in tokens.items()}

    def _possible(
        self, planned: Sequence[SpeculativeSequence], links: Sequence[ActiveLink], num_rows: int
    ) -> dict[str, float]:
        """Of each model, were all sequences shared evenly by the workers that have it, as deep as is best for them."""
        temperatures = Counter(sequence.params.temperature for sequence in planned)
        if not temperatures:
            return self._goodputs
        costs, handicap = self._planner.step_costs(num_rows), self._planner.probing.handicap
        goodputs: dict[str, float] = {}
        for model, workers in Counter(link.model for link in links).items():
            known = [link for link in links if link.model == model and link.costs.is_known]
            if not known:
                continue
            survival = sum(
                (count * self._planner.survival(model, temperature) for temperature, count in temperatures.items()),
                np.zeros(1),
            ) / sum(temperatures.values())
            depths = np.arange(1, len(survival) + 1)
            batches = np.full(len(depths), -(-costs.num_rows // workers))
            waits = np.min([link.costs.wait_seconds(depths, batches) for link in known], axis=0)
            goodputs[model] = float(costs.rates(survival, waits).max()) / costs.plain_rate / handicap
        return goodputs

    def readings(self) -> Iterator[Reading]:
        """Any thread."""
        gain = "Tokens a second as speculation is done now over plain decoding, by draft model; 1: not speculated on."
        is_stale = self._clock() > self._planned_at + _STALE_SECONDS
        for model, ratio in self._gains.items():
            value = 1.0 if is_stale else ratio
            yield Reading("outrider_speculation_gain_ratio", gain, value, labels={"draft": model})
        could = "Tokens a second that drafts of this model would give at their best depth, over plain decoding."
        for model, ratio in self._goodputs.items():
            yield Reading("outrider_goodput_ratio", could, ratio, labels={"draft": model})
