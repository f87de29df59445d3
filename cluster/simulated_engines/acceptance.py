"""Acceptance of a simulated drafter."""

from __future__ import annotations

from collections.abc import Callable

from cluster.config.simulation import SimulationConfig


class AcceptanceSchedule:
    """Probability that a draft is right: by its place in a proposal, or a number that changes at set seconds."""

    def __init__(self, simulation: SimulationConfig, clock: Callable[[], float]) -> None:
        numbers = simulation.acceptance
        self._by_place = (numbers,) if isinstance(numbers, float) else numbers
        self._schedule = simulation.acceptance_schedule
        self._clock = clock
        self._started_at: float | None = None

    def start(self) -> None:
        """Starts the clock of the schedule, with the first sequence."""
        if self._started_at is None:
            self._started_at = self._clock()

    def at(self, place: int) -> float:
        if self._schedule and self._started_at is not None:
            elapsed = self._clock() - self._started_at
            begun = [acceptance for second, acceptance in self._schedule if second <= elapsed]
            if begun:
                return begun[-1]
        return self._by_place[min(place, len(self._by_place) - 1)]
