"""The verdict: ratios of tokens per second with their spread, and the placement to use."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from services.prove.measure import Results
from services.prove.systems import BESIDE, PLAIN, REMOTE, STOCK

_LEAST_GAIN = 1.03  # minimum gain of a recommended placement: less may be chance
_PLACEMENTS = {
    BESIDE: "the draft on the target's device",
    REMOTE: "the draft on its own device",
}


@dataclass(frozen=True, slots=True)
class Ratio:
    """Tokens per second of one system divided by another's, for each repeat with both."""

    values: tuple[float, ...]

    def __str__(self) -> str:
        if not self.values:
            return "-"
        spread = "one repeat" if len(self.values) == 1 else f"{min(self.values):.2f} to {max(self.values):.2f}"
        return f"{self.median:.2f} ({spread})"

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def is_above(self) -> bool:
        """True if it is above 1 in every repeat."""
        return bool(self.values) and min(self.values) > 1.0

    @property
    def is_gain(self) -> bool:
        """True if it is above 1 in every repeat, and by enough in the median."""
        return self.is_above and self.median >= _LEAST_GAIN

    @property
    def is_below(self) -> bool:
        """True if it is below 1 in every repeat."""
        return bool(self.values) and max(self.values) < 1.0


def ratio(results: Results, system: str, other: str, num_streams: int) -> Ratio:
    rates = {one.repeat: one.tokens_per_second for one in results.of(other, num_streams)}
    pairs = [(one.tokens_per_second, rates.get(one.repeat)) for one in results.of(system, num_streams)]
    return Ratio(tuple(own / rate for own, rate in pairs if rate))


def median_rate(results: Results, system: str, num_streams: int) -> float | None:
    """Returns the median tokens per second over the repeats; None if not measured."""
    rates = [one.tokens_per_second for one in results.of(system, num_streams)]
    return statistics.median(rates) if rates else None


def best(results: Results, num_streams: int) -> str | None:
    """Returns the placement to use: one that gains over k = 0, or else k = 0. None if none was measured.

    A placement gains if it is faster in every repeat, and by 3 % in the median. `remote` takes a second device, so it
    has to gain over `beside` too.
    """
    gains = {system: ratio(results, system, PLAIN, num_streams) for system in _PLACEMENTS}
    if not any(gain.values for gain in gains.values()):
        return None
    paying = [system for system, gain in gains.items() if gain.is_gain]
    if paying == [BESIDE, REMOTE]:
        return REMOTE if ratio(results, REMOTE, BESIDE, num_streams).is_gain else BESIDE
    return paying[0] if paying else PLAIN


def num_streams_text(num_streams: int) -> str:
    return "1 stream" if num_streams == 1 else f"{num_streams} streams"


def verdicts(results: Results) -> list[str]:
    """Returns one sentence or two for each number of streams."""
    return [_verdict(results, num_streams) for num_streams in results.experiment.streams]


def _verdict(results: Results, num_streams: int) -> str:
    at = num_streams_text(num_streams)
    chosen = best(results, num_streams)
    if chosen is None:
        return f"{at}: not measured."
    rate = median_rate(results, chosen, num_streams) or 0.0
    gains = {system: ratio(results, system, PLAIN, num_streams) for system in _PLACEMENTS}
    if chosen == PLAIN:
        shown = ", ".join(f"`{system}` {gain}" for system, gain in gains.items() if gain.values)
        head = f"{at}: decode without drafts (`k = 0`), {rate:.0f} tokens/s: no placement gains "
        head += f"(times `k = 0`: {shown})."
    else:
        head = f"{at}: use `{chosen}`, {_PLACEMENTS[chosen]}: {rate:.0f} tokens/s, {gains[chosen]} times `k = 0`"
        other = BESIDE if chosen == REMOTE else REMOTE
        head += f"; `{other}` has {gains[other]} times." if gains[other].values else "."
    return " ".join([head, *_over_stock(ratio(results, chosen, STOCK, num_streams))])


def _over_stock(over: Ratio) -> Sequence[str]:
    if not over.values:
        return ()
    if over.is_above:
        return (f"That is {over} times `{STOCK}`.",)
    if over.is_below:
        return (f"`{STOCK}` is faster: that is {over} times its tokens/s.",)
    return (f"`{STOCK}` is as fast within the spread: that is {over} times its tokens/s.",)
