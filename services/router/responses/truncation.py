"""Leaves out the oldest messages of a chat until its prompt fits (`truncation: auto`)."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from cluster.errors import ContextLengthError
from services.router.chat.messages import Message

_CHARACTERS_PER_TOKEN = 4.0  # before the first measurement
_MAX_GUESSES = 6  # after them the search halves what is left


def longest_that_fits(
    messages: Sequence[Message], encode: Callable[[Sequence[Message]], list[int]], room: int
) -> list[int]:
    """Returns the longest prompt of `messages`, without some of the oldest, that has at most `room` tokens.

    System messages stay, and a user message follows them, so that no tool result is left without its call. The
    shortest prompt begins with the last user message. Returns [] if it does not fit either. `encode` returns the tokens
    of messages, or raises ContextLengthError if they are clearly too many.

    Encoding a long chat takes seconds, so the search begins where the lengths of the texts predict the end. It encodes
    little more than what fits, a few times.
    """
    starts = [0, *(index for index in range(1, len(messages)) if messages[index]["role"] == "user")]
    sizes = _sizes(messages, starts)
    prompt: list[int] = []
    too_long, fits = -1, len(starts)  # the last start that does not fit, and the first that does
    rate = _CHARACTERS_PER_TOKEN
    num_guesses = 0
    while fits - too_long > 1:
        middle = (too_long + fits) // 2
        if num_guesses < _MAX_GUESSES:  # sizes fall
            predicted = bisect.bisect_left(sizes, -room * rate, key=lambda size: -size)
            middle = min(max(predicted, too_long + 1), fits - 1)
        num_guesses += 1
        try:
            attempt = encode(_from(messages, starts[middle]))
        except ContextLengthError as error:
            too_long, num_tokens = middle, error.num_prompt_tokens
        else:
            num_tokens = len(attempt)
            if num_tokens <= room:
                fits, prompt = middle, attempt
            else:
                too_long = middle
        rate = sizes[middle] / max(1, num_tokens)
    return prompt


def _from(messages: Sequence[Message], start: int) -> list[Message]:
    return [message for message in messages[:start] if message["role"] == "system"] + list(messages[start:])


def _sizes(messages: Sequence[Message], starts: Sequence[int]) -> list[int]:
    """Returns the number of characters in `_from` of each of `starts`."""
    own = [_size(message) for message in messages]
    is_system = [message["role"] == "system" for message in messages]
    before = [0, *accumulate(size if stays else 0 for size, stays in zip(own, is_system, strict=True))]
    after = [0, *accumulate(reversed(own))]
    return [before[start] + after[len(own) - start] for start in starts]


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 1
