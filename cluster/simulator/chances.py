"""How many drafts come true, drawn as often as is configured."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cluster.config_simulation import SimulationConfig
from cluster.simulation.acceptance import AcceptanceSchedule
from cluster.speculation.depth import IntArray

_MOST = 160  # drafts in a row: a window is 130 at most


class Chances:
    """Of one draft worker: how many drafts in a row will equal what the target chooses.

    Whether a draft is right depends on its place in the proposal alone, as it does for the simulated drafter.
    """

    def __init__(self, simulation: SimulationConfig, rng: np.random.Generator, clock: Callable[[], float]) -> None:
        self._schedule = AcceptanceSchedule(simulation, clock)
        self._changes = bool(simulation.acceptance_schedule)
        self._rng = rng
        self._survival = self._table()

    def start(self) -> None:
        """The first sequence comes."""
        self._schedule.start()
        self._survival = self._table()

    def draw(self, places: IntArray) -> IntArray:
        """Where all before `places` were right: how many are from the beginning of the proposal."""
        if self._changes:
            self._survival = self._table()
        reached = self._survival[places] * self._rng.random(len(places))
        return np.searchsorted(-self._survival[1:], -reached)

    def _table(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        rates = [self._schedule.at(place) for place in range(_MOST)]
        return np.concatenate([[1.0], np.cumprod(rates)])
