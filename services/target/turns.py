"""Turns of the owners of requests at a target.

Engines start waiting requests in the order of a number, the lowest first. Here the number grows with the tokens of the
owner's earlier requests that have not ended: the next request of a busy owner starts after the first one of another.
This follows the start tags of start-time fair queueing (Goyal and others, 1996), on a logarithmic scale: prompts in
one turn share a step, so short ones do not wait for long ones.
"""

from __future__ import annotations

from collections import Counter

_TURN_TOKENS = 1024  # the first turn of an owner, in tokens; each further one is as large as all before it
_PRIORITY_BITS = 32  # the lower bits of a number order the requests of one turn


class OwnerTurns:
    def __init__(self) -> None:
        # Tokens of each owner's requests: those with a negative priority, with 0, and with a positive one.
        self._work: dict[bytes, Counter[int]] = {}
        self._entered: dict[str, tuple[bytes, int, int]] = {}

    def enter(self, request_id: str, owner: bytes, priority: int, num_tokens: int) -> int:
        """Returns the number of a request with `num_tokens` tokens, which lasts until `leave`.

        `priority` (a signed 32-bit integer) orders the requests of a turn. Without an owner it is the turn itself.
        """
        if not owner:
            return priority << _PRIORITY_BITS
        level = (priority > 0) - (priority < 0)
        work = self._work.setdefault(owner, Counter())
        before = sum(tokens for other, tokens in work.items() if other <= level)
        work[level] += num_tokens
        self._entered[request_id] = owner, level, num_tokens
        return ((before // _TURN_TOKENS).bit_length() << _PRIORITY_BITS) + priority

    def leave(self, request_id: str) -> None:
        """Ends the work of a request, if it has entered."""
        entered = self._entered.pop(request_id, None)
        if entered is None:
            return
        owner, level, num_tokens = entered
        work = self._work[owner]
        work[level] -= num_tokens
        if not +work:
            del self._work[owner]
