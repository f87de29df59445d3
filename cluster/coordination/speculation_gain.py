"""Reports the possible gain of each draft model and the current gain of speculation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from cluster.coordination.depths import DepthPlanner
from cluster.coordination.sequence import ActiveLink, SpeculativeSequence
from cluster.speculation.costs import LinkCosts
from cluster.speculation.demand import NUM_BATCHES, DraftDemand
from cluster.telemetry.metrics import Reading

_SECONDS = 1.0  # time between two estimates, which take as long as a plan
_STALE_SECONDS = 10.0  # time without a plan after which speculation counts as idle
_BATCHES = [2**power for power in range(NUM_BATCHES)]


class SpeculationGain:
    """Estimates the gain of speculation. Belongs to the engine's thread except for `readings` and `demand`."""

    def __init__(self, planner: DepthPlanner, clock: Callable[[], float]) -> None:
        self._planner = planner
        self._clock = clock
        self._estimate_at = clock()
        self._planned_at = -_STALE_SECONDS
        self._gains: dict[str, float] = {}
        self._goodputs: dict[str, float] = {}
        self._costs: dict[str, list[LinkCosts]] = {}  # costs of each model's workers; kept while no link is up
        self._demand: DraftDemand | None = None

    def planned(
        self, planned: Sequence[SpeculativeSequence], links: Iterable[ActiveLink], num_rows: int, num_draftable: int
    ) -> None:
        """Updates the estimates after a plan for the sequences `planned`; at most once a second.

        `links`: all links that are up. `num_rows`: sequences in the step, including `planned`. `num_draftable`:
        sequences that have a drafter or wait for one.
        """
        now = self._clock()
        if now < self._estimate_at or not self._planner.steps.is_known:
            return
        self._estimate_at, self._planned_at = now + _SECONDS, now
        links = list(links)
        num_workers = Counter(link.model for link in links)
        self._gains = dict.fromkeys(num_workers, 1.0) | self._now(planned)
        for model in num_workers:
            if known := [link.costs for link in links if link.model == model and link.costs.is_known]:
                self._costs[model] = known
        if num_workers:  # forgets models that have gone
            self._costs = {model: costs for model, costs in self._costs.items() if model in num_workers}
        temperatures = Counter(sequence.params.temperature for sequence in planned)
        by_batch = {}
        for model in self._costs if temperatures and self._planner.max_depth else ():
            batch = -(-max(1, num_rows) // max(1, num_workers[model]))
            *by_batch[model], gain = self._possible(model, temperatures, num_rows, [*_BATCHES, batch])
            if num_workers[model]:
                self._goodputs = self._goodputs | {model: gain}  # a new dict: `readings` may iterate over the old one
        if by_batch:
            self._demand = DraftDemand(num_draftable, tuple(map(max, zip(*by_batch.values(), strict=True))))

    def _now(self, planned: Sequence[SpeculativeSequence]) -> dict[str, float]:
        """Returns the gain by draft model: the measured gain, scaled by the mean tokens per round of its sequences."""
        tokens: dict[str, list[float]] = {}
        for sequence in planned if self._planner.has_drafts else ():
            if sequence.link is not None:
                tokens.setdefault(sequence.link.model, []).append(sequence.expected_tokens)
        mean = sum(map(sum, tokens.values())) / max(1, sum(map(len, tokens.values())))
        gain = self._planner.realised.gain
        return {model: gain * sum(expected) / len(expected) / mean for model, expected in tokens.items()}

    def _possible(self, model: str, temperatures: Counter[float], num_rows: int, batches: Sequence[int]) -> list[float]:
        """Returns the predicted gain at the best depth for each number of sequences per worker."""
        speed = self._planner.speed(num_rows)
        survival = sum(
            (count * self._planner.survival(model, temperature) for temperature, count in temperatures.items()),
            np.zeros(1),
        ) / sum(temperatures.values())
        depths, every_batch = np.meshgrid(np.arange(1, len(survival) + 1), batches)
        links = self._costs[model]
        waits = np.array([link.wait_seconds(depths, every_batch) for link in links])
        # A worker's costs are unknown beyond its largest batch, and would seem to be zero: ignore it for these batches.
        seen = np.array([link.largest_batch for link in links])
        knows = seen[:, None] >= np.minimum(batches, seen.max())
        waits = np.where(knows[:, :, None], waits, np.inf).min(axis=0)
        rates = speed.by_depth(survival, waits).max(axis=1)
        ratios: list[float] = (rates / speed.plain * self._planner.realised.share).tolist()
        return ratios

    def demand(self) -> DraftDemand | None:
        """Returns the predicted gain of drafts; None if unknown. Thread-safe."""
        if self._demand is not None and self._clock() > self._planned_at + _STALE_SECONDS:
            return DraftDemand(0, self._demand.goodputs)
        return self._demand

    def readings(self) -> Iterator[Reading]:
        """Any thread."""
        gain = (
            "Tokens per second with speculation as configured over plain decoding, by draft model; 1: no speculation."
        )
        is_stale = self._clock() > self._planned_at + _STALE_SECONDS
        for model, ratio in self._gains.items():
            value = 1.0 if is_stale else ratio
            yield Reading("outrider_speculation_gain_ratio", gain, value, labels={"draft": model})
        could = "Tokens per second that drafts of this model would reach at their best depth, over plain decoding."
        for model, ratio in self._goodputs.items():
            yield Reading("outrider_goodput_ratio", could, ratio, labels={"draft": model})
