"""Interface between engines and grammars: the state of a text in its grammar. Does not import llguidance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Matcher(Protocol):
    """The state of a text in its grammar."""

    @property
    def error(self) -> str | None:
        """Returns the limit that the text exceeds, so that no token can follow; None if it exceeds none."""

    @property
    def refused_because(self) -> str | None:
        """Returns the limit that made the last `accept_token` fail; None if the grammar forbids the token."""

    def accept_token(self, token_id: int, /) -> bool: ...

    def rollback(self, num_tokens: int, /) -> None: ...

    def is_terminated(self) -> bool: ...

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int, /) -> bool: ...

    def likely_token_ids(self, most: int, /) -> Sequence[int]:
        """Returns at most `most` tokens that probably come next, because the grammar allows only one text.

        Must not be called after the end of the text.
        """


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A compiled grammar, for an engine in this process or in another."""

    new_matcher: Callable[[], Matcher]  # creates a matcher at the beginning of the text
    written: str  # the grammar, for another process
    vocabulary: str  # the vocabulary it was compiled for, likewise
