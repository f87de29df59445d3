"""The engine's state of one generation."""

from __future__ import annotations

import enum
from collections.abc import MutableSequence
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from cluster.speculation.drafts import num_useful_drafts


class FinishReason(enum.Enum):
    STOP = "stop"  # a token that ends the sequence
    LENGTH = "length"  # the maximum length


@dataclass(eq=False, slots=True)
class Sequence:
    """Committed tokens and the location of their KV.

    `token_ids` are the prompt and the committed tokens. The KV of the first `num_computed_tokens` tokens is in the
    blocks of `block_table`, or a scheduled step computes it; while a sequence decodes, all tokens except the last are
    computed. Later slots may contain the KV of rejected drafts; these slots are written again before they are read.

    If a step is scheduled before the previous one has ended, up to `num_unread_tokens` unread tokens follow
    `token_ids`. `num_tokens` and `num_computed_tokens` count all of them until the previous step ends.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    max_len: int  # prompt and generated tokens at most
    end_token_ids: frozenset[int]  # each of them ends the sequence
    max_drafts: int  # per round
    priority: int = 0  # of an owner's waiting sequences the one with the lowest value goes first
    owner: bytes = b""  # who shares the target fairly with other owners; b"": unknown
    cache_root: bytes | None = None  # KV is shared only between sequences with the same root
    first_unscored: int | None = None  # first prompt token that is not scored yet; None: prompt tokens are not scored
    num_computed_tokens: int = 0
    num_unread_tokens: int = 0  # maximum number of tokens that unfinished steps will choose
    num_preemptions: int = 0
    block_table: MutableSequence[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None  # found in the prefix cache at the first admission; None: not admitted yet

    @property
    def num_tokens(self) -> int:
        """Maximum number of tokens, including those that the host does not know yet."""
        return len(self.token_ids) + self.num_unread_tokens

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed_tokens < self.num_tokens - 1

    @property
    def will_end(self) -> bool:
        """True if the unread tokens end the sequence, whichever and how many they are."""
        return self.num_unread_tokens > 0 and len(self.token_ids) + 1 >= self.max_len

    @property
    def is_scoring(self) -> bool:
        """True if logits of prompt tokens are still needed."""
        return self.first_unscored is not None and self.first_unscored < self.num_prompt_tokens

    @property
    def max_useful_drafts(self) -> int:
        """Maximum number of drafts that could be committed."""
        return num_useful_drafts(self.max_drafts, self.num_tokens, self.max_len)

    def commit(self, token_ids: Tokens[int]) -> int:
        """Appends `token_ids` up to the end of the sequence. Returns the number of appended tokens."""
        for count, token in enumerate(token_ids, start=1):
            self.token_ids.append(token)
            if token in self.end_token_ids:
                self.finish_reason = FinishReason.STOP
                return count
            if len(self.token_ids) >= self.max_len:
                self.finish_reason = FinishReason.LENGTH
                return count
        return len(token_ids)
