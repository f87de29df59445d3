"""What draft workers are worth, found out once a plan."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.coordination.sequence import ActiveLink
from cluster.coordination.worth import Planned, Worth

_EXACT = 16  # sequences of a worker, up to which their number is not rounded
_ROUNDING = 4


class Worths(Worth):
    """`Worth`, whose answers hold until `renew`, and for numbers of sequences that differ by a few.

    A target that opens some sequences in every step would otherwise do nothing but weigh draft workers.
    """

    def __init__(self, planner: Planned) -> None:
        super().__init__(planner)
        self._known: dict[tuple[int, int, int], float] = {}

    def renew(self) -> None:
        self._known.clear()

    def of(self, link: ActiveLink, links: Iterable[ActiveLink], temperature: float, num_more: int = 0) -> float:
        number = len(link.sequences)
        rounded = number if number <= _EXACT else number - number % _ROUNDING
        key = id(link), rounded, num_more
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = super().of(link, links, temperature, num_more)
        return known
