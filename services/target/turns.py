"""Turns of the owners of requests at a target.

Engines serve waiting requests by a number, the lowest first. Here it is the work under way that comes before a request
in its owner's order: an owner with little of it comes before one with much. This follows the start tags of start-time
fair queueing (Goyal and others, 1996). The number is coarse, as prompts with the same number share a step's room, and
short ones then do not wait for long ones.
"""

from __future__ import annotations

from collections import Counter

_TURN_TOKENS = 1024  # work of an owner within which its requests do not wait for those of others


class Turns:
    def __init__(self) -> None:
        self._work: dict[bytes, Counter[int]] = {}  # tokens of each owner's requests, by their priorities
        self._entered: dict[str, tuple[bytes, int, int]] = {}

    def enter(self, request_id: str, owner: bytes, priority: int, num_tokens: int) -> int:
        """Returns the number for a request of `owner` with `num_tokens` tokens.

        `priority` orders an owner's own requests; without an owner it is the number itself.
        """
        if not owner:
            return priority
        work = self._work.setdefault(owner, Counter())
        before = sum(tokens for other, tokens in work.items() if other <= priority)
        work[priority] += num_tokens
        self._entered[request_id] = owner, priority, num_tokens
        return (before // _TURN_TOKENS).bit_length()

    def leave(self, request_id: str) -> None:
        """Ends the work of a request, if it has entered."""
        entered = self._entered.pop(request_id, None)
        if entered is None:
            return
        owner, priority, num_tokens = entered
        work = self._work[owner]
        work[priority] -= num_tokens
        if not work[priority]:
            del work[priority]
        if not work:
            del self._work[owner]
