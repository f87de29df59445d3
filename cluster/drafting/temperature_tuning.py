"""Finds the draft temperature with the highest acceptance for each target temperature, from outcomes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from cluster.drafting.entries import Entry
from cluster.speculation.draft_temperature import DraftTemperature, factor_of
from cluster.telemetry.metrics import Reading
from cluster.wire.messages import Advance

_ROUNDS_A_TEMPERATURE = 8  # rounds of a sequence before its draft temperature may change


class TemperatureTuning:
    """Temperature searches by target temperature. Belongs to the draft worker's thread, except for `readings`."""

    def __init__(self) -> None:
        self._searches: dict[float, DraftTemperature] = defaultdict(DraftTemperature)  # searches by target temperature

    def readings(self) -> Iterator[Reading]:
        """Any thread."""
        what = "Draft temperature over the target's, by the target's temperature."
        for temperature, search in tuple(self._searches.items()):
            labels = {"temperature": f"{temperature:g}"}
            yield Reading("outrider_draft_temperature_factor", what, factor_of(search.best), labels=labels)

    def learn(self, entry: Entry, advance: Advance) -> None:
        """Learns from the last proposal of `entry`; every few rounds changes the draft temperature of `entry`.

        Must be called before `advance` is applied.
        """
        sequence, params = entry.sequence, entry.target_params
        if params.is_greedy:
            return
        news = advance.token_ids[sequence.base - advance.base :]
        search = self._searches[round(params.temperature, 2)]
        search.observe(entry.exponent, *entry.tested(news))
        entry.num_rounds += 1
        if entry.num_rounds >= _ROUNDS_A_TEMPERATURE:
            entry.num_rounds, entry.exponent = 0, search.next_exponent()
            temperature = params.temperature * factor_of(entry.exponent)
            sequence.params = replace(params, temperature=temperature)
