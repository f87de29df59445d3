"""What a draft worker is worth to a sequence: the tokens a second that its drafts would give, as deep as is best."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from cluster.coordination.sequence import ActiveLink
from cluster.speculation.depth import Needs
from cluster.speculation.goodput import FloatArray, StepCosts


class Planned(Protocol):
    """What is asked of a planner of depths."""

    needs: Needs
    opening_depth: int  # of a new sequence

    @property
    def num_planned_rows(self) -> int: ...

    def survival(self, model: str, temperature: float) -> FloatArray: ...

    def step_costs(self, num_rows: int) -> StepCosts: ...


class Worth:
    """By the controller's own measures: its proposals' time and its model's acceptance."""

    def __init__(self, planner: Planned) -> None:
        self._planner = planner

    def of(self, link: ActiveLink, links: Iterable[ActiveLink], temperature: float, num_more: int = 0) -> float:
        """With `num_more` sequences beside those that it has, if all of the step were drafted for like this.

        Of one that nothing was measured of, the way is guessed by its place, and all else taken to be as with the
        others of `links`, those of the same model first.
        """
        survival, needs = self._planner.survival(link.model, temperature), self._planner.needs
        costs = self._planner.step_costs(self._planner.num_planned_rows)
        depths = np.arange(1, len(survival) + 1)
        batches = np.full(len(depths), max(1, len(link.sequences) + num_more))
        waits = np.zeros(len(depths))
        known = link if link.costs.is_known else _like(link, links)
        if known is not None:
            waits = known.costs.wait_seconds(depths, batches)
        if known is not link and link.expected_round_trip is not None:
            measured = 0.0 if known is None else known.costs.round_trip_seconds
            waits = np.maximum(waits + link.expected_round_trip - measured, 0.0)
        own = costs.rates(survival, waits)
        return float(own.max() if needs.measurements else own[max(1, self._planner.opening_depth) - 1])


def _like(link: ActiveLink, links: Iterable[ActiveLink]) -> ActiveLink | None:
    known = [other for other in links if other.costs.is_known]
    return next((other for other in known if other.model == link.model), known[0] if known else None)
