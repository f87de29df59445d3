"""The tokens of a sequence that a draft model reads: all of them, or the first ones and the last ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

ContextTokens = int | Literal["auto"] | None
"The setting `draft.context_tokens`."

NUM_SINKS = 4  # first tokens of a sequence that are always read, because models attend to them from everywhere


_FEWEST, _MOST, _FACTOR = 128, 8192, 4


def context_choices(num_tokens: int) -> list[int | None]:
    """Returns the choices of `draft.context_tokens: auto` for a prompt of `num_tokens` tokens, the smallest first.

    None: all tokens. Each other choice skips at least half of them.
    """
    choices: list[int | None] = []
    number = _FEWEST
    while number <= min(_MOST, num_tokens // 2):
        choices.append(number)
        number *= _FACTOR
    return [*choices, None]


class ReadTokens(Sequence[int]):
    """The tokens of a sequence except for `num_skipped` tokens from index `first_skipped` on. Grows with the sequence.

    Token t of these has place t in the KV cache and position t in the model, so the model computes the same as for a
    sequence without the skipped tokens. Slices have no step.
    """

    __slots__ = ("_first_skipped", "_token_ids", "num_skipped")

    def __init__(self, token_ids: Sequence[int], num_skipped: int = 0, first_skipped: int = 0) -> None:
        self.num_skipped = num_skipped
        self._first_skipped = first_skipped
        self._token_ids = token_ids

    def __len__(self) -> int:
        return len(self._token_ids) - self.num_skipped

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, int):
            place = range(len(self))[index]
            return self._token_ids[place if place < self._first_skipped else place + self.num_skipped]
        start, stop, _ = index.indices(len(self))
        num_first = max(0, min(stop, self._first_skipped) - start)
        rest = self._token_ids[start + num_first + self.num_skipped : stop + self.num_skipped]
        return [*self._token_ids[start : start + num_first], *rest] if num_first else rest
