"""How often a simulated drafter is right."""

from __future__ import annotations

from collections.abc import Callable

from cluster.config.simulation import SimulationConfig


class AcceptanceSchedule:
    """How often drafts are right: by their place in a proposal, or from some second on by that second's number."""

    def __init__(self, simulation: SimulationConfig, clock: Callable[[], float]) -> None:
        numbers = simulation.acceptance
        self._by_place = (numbers,) if isinstance(numbers, float) else numbers
        self._schedule = simulation.acceptance_schedule
        self._clock = clock
        self._started_at: float | None = None

    def start(self) -> None:
        """The clock of the schedule starts with the first sequence."""
        if self._started_at is None:
            self._started_at = self._clock()

    def at(self, place: int) -> float:
        if self._schedule and self._started_at is not None:
            elapsed = self._clock() - self._started_at
            begun = [acceptance for second, acceptance in self._schedule if second <= elapsed]
            if begun:
                return begun[-1]
        return self._by_place[min(place, len(self._by_place) - 1)]
