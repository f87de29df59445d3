"""Predicts the value of a draft worker for a sequence: tokens per second with its drafts, at the best depth."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cluster.coordination.depths import DepthPlanner
from cluster.coordination.sequence import ActiveLink
from cluster.speculation.tuning import WINDOW


class LinkValue:
    """Predicts the value from measured proposal times and from the measured acceptance of the draft model."""

    def __init__(self, planner: DepthPlanner) -> None:
        self._planner = planner
        self._measured: set[str] = set()  # draft models
        self.max_depth = max(1, planner.max_depth)

    def of(self, link: ActiveLink, links: Iterable[ActiveLink], temperature: float, num_more: int = 0) -> float:
        """Returns the predicted tokens per second if `link` drafted for every sequence of the step.

        `num_more`: sequences to add to those of `link`. For a link without measurements, the round trip is estimated
        from its place, and the other costs are those of another link in `links`, if possible with the same model.
        """
        planner = self._planner
        survival = planner.survival(link.model, temperature)
        if not len(survival):  # happens if speculation.max_speculative_tokens is 0
            return 0.0
        depths = np.arange(1, len(survival) + 1)
        waits = np.zeros(len(depths))
        known = link if link.costs.is_known else _like(link, links)
        if known is not None:
            waits = known.costs.wait_seconds(depths, np.full(len(depths), max(1, len(link.sequences) + num_more)))
        if known is not link and link.expected_round_trip is not None:
            measured = 0.0 if known is None else known.costs.round_trip_seconds
            waits = np.maximum(waits + link.expected_round_trip - measured, 0.0)
        rates = planner.speed(planner.num_planned_rows).by_depth(survival, waits)
        return float(rates.max() if planner.measures else rates[max(1, planner.initial_depth) - 1])

    def is_measured(self, link: ActiveLink) -> bool:
        """Returns True if the acceptance of the link's draft model has been known within about 0.05."""
        if link.model not in self._measured and self._planner.most_tests(link.model) >= WINDOW / 2:
            self._measured.add(link.model)
        return link.model in self._measured


def _like(link: ActiveLink, links: Iterable[ActiveLink]) -> ActiveLink | None:
    known = [other for other in links if other.costs.is_known]
    return next((other for other in known if other.model == link.model), known[0] if known else None)
