"""What each draft model of the pool would give, and what speculation gains now: for placing, and for whoever looks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from cluster.coordination.depths import DepthPlanner
from cluster.coordination.sequence import ActiveLink, SpeculativeSequence
from cluster.speculation.costs import LinkCosts
from cluster.speculation.demand import NUM_BATCHES, DraftDemand
from cluster.telemetry.metrics import Reading

_SECONDS = 1.0  # between two estimates
_STALE_SECONDS = 10.0  # after so long without a plan nothing is speculated on
_BATCHES = [2**power for power in range(NUM_BATCHES)]


class Gains:
    """Belongs to the engine's thread but for `readings` and `demand`."""

    def __init__(self, planner: DepthPlanner, clock: Callable[[], float]) -> None:
        self._planner = planner
        self._clock = clock
        self._estimate_at = clock()
        self._planned_at = -_STALE_SECONDS
        self._gains: dict[str, float] = {}
        self._goodputs: dict[str, float] = {}
        self._costs: dict[str, list[LinkCosts]] = {}  # of the workers of each model, those that were there last
        self._demand: DraftDemand | None = None

    def planned(
        self, planned: Sequence[SpeculativeSequence], links: Iterable[ActiveLink], num_rows: int, num_draftable: int
    ) -> None:
        """`planned`, of the `num_rows` sequences of a step, have depths from now on; `links` are all that are up.

        `num_draftable` would be drafted for if there were room for all.
        """
        now = self._clock()
        if now < self._estimate_at or not self._planner.step_seconds.is_known:
            return
        self._estimate_at, self._planned_at = now + _SECONDS, now
        links = list(links)
        num_workers = Counter(link.model for link in links)
        self._gains = dict.fromkeys(num_workers, 1.0) | self._now(planned, num_rows)
        for model in num_workers:
            if known := [link.costs for link in links if link.model == model and link.costs.is_known]:
                self._costs[model] = known
        if num_workers:  # what was known of models that have gone says nothing of those that are there
            self._costs = {model: costs for model, costs in self._costs.items() if model in num_workers}
        self._estimate(planned, num_workers, num_rows)
        if self._demand is not None:
            self._demand = replace(self._demand, num_sequences=num_draftable)

    def _now(self, planned: Sequence[SpeculativeSequence], num_rows: int) -> dict[str, float]:
        """Tokens a second of the sequences that each model drafts for, over what they would have without any drafts."""
        costs = self._planner.step_costs(num_rows)
        drafted = [s for s in planned if s.link is not None and s.depth > 0]
        if not drafted:
            return {}
        num_drafts = sum(sequence.depth for sequence in drafted)
        num_tokens = costs.num_rows + sum(sequence.expected_tokens - 1.0 for sequence in drafted)
        step = costs.seconds(num_drafts, num_tokens) + self._planner.expected_wait(drafted)
        # As the two kinds of plans have come true so far.
        slower = step * costs.plain_rate * self._planner.probing.handicap
        tokens: dict[str, list[float]] = {}
        for sequence in planned:
            if sequence.link is not None:
                expected = sequence.expected_tokens if sequence.depth > 0 else 1.0
                tokens.setdefault(sequence.link.model, []).append(expected)
        return {model: sum(expected) / len(expected) / slower for model, expected in tokens.items()}

    def _estimate(self, planned: Sequence[SpeculativeSequence], num_workers: Counter[str], num_rows: int) -> None:
        """What each model would give, were all sequences shared evenly by the workers that have it; and what the best
        would, by how many a worker has."""
        temperatures = Counter(sequence.params.temperature for sequence in planned)
        if not temperatures:
            return
        by_batch = {}
        for model in self._costs:
            batch = -(-max(1, num_rows) // max(1, num_workers[model]))
            *by_batch[model], now = self._possible(model, temperatures, num_rows, [*_BATCHES, batch])
            if num_workers[model]:
                self._goodputs = self._goodputs | {model: now}  # anew: `readings` may be going through it
        if by_batch:
            self._demand = DraftDemand(len(planned), tuple(map(max, zip(*by_batch.values(), strict=True))))

    def _possible(self, model: str, temperatures: Counter[float], num_rows: int, batches: Sequence[int]) -> list[float]:
        """As deep as is best, for each number of sequences that a worker may have."""
        costs = self._planner.step_costs(num_rows)
        survival = sum(
            (count * self._planner.survival(model, temperature) for temperature, count in temperatures.items()),
            np.zeros(1),
        ) / sum(temperatures.values())
        depths, every_batch = np.meshgrid(np.arange(1, len(survival) + 1), batches)
        links = self._costs[model]
        waits = np.array([link.wait_seconds(depths, every_batch) for link in links])
        # Beyond what it has seen a worker's step seems to take no longer: those count that have seen most.
        seen = np.array([link.largest_batch for link in links])
        knows = seen[:, None] >= np.minimum(batches, seen.max())
        waits = np.where(knows[:, :, None], waits, np.inf).min(axis=0)
        rates = costs.rates(survival, waits).max(axis=1)
        ratios: list[float] = (rates / costs.plain_rate / self._planner.probing.handicap).tolist()
        return ratios

    def demand(self) -> DraftDemand | None:
        """What drafts would give; None: not known. Any thread."""
        if self._demand is not None and self._clock() > self._planned_at + _STALE_SECONDS:
            return replace(self._demand, num_sequences=0)
        return self._demand

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
