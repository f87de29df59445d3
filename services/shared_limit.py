"""A limit that API keys share."""

from __future__ import annotations

from collections import Counter

_TIMES_THE_REST = 4


class SharedLimit:
    """Amounts that owners hold, limited in all. Not thread-safe.

    An owner may hold at most four times what nobody holds (dynamic thresholds: Choudhury and Hahne, 1998). So one who
    is alone may hold four fifths of the limit, and however many owners hold as much as they may, there is a rest. Those
    without a name are not limited by it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._held_by: Counter[str | bytes] = Counter()  # owners that hold something

    def has_room(self, owner: str | bytes | None, amount: int) -> bool:
        """Returns whether `owner` may take `amount` more."""
        rest = self.limit - self.held - amount
        if not owner or not self.held:
            return rest >= 0
        return rest >= 0 and self._held_by[owner] + amount <= _TIMES_THE_REST * rest

    def take(self, owner: str | bytes | None, amount: int) -> None:
        self.held += amount
        if owner:
            self._held_by[owner] += amount

    def give_back(self, owner: str | bytes | None, amount: int) -> None:
        self.held -= amount
        if owner:
            self._held_by[owner] -= amount
            if self._held_by[owner] <= 0:
                del self._held_by[owner]
