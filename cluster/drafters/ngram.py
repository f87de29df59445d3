"""Prompt lookup: proposes the tokens that followed an earlier occurrence of the last tokens (Saxena, 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.drafters.base import Drafter, DraftSequence
from cluster.engine.limits import StepLimits

_LONGEST_RUN = 4  # tokens that are looked up; a longer run is found by its last ones


class NgramDrafter(Drafter):
    """Drafter without a model, which proposes from the text so far: good for code, quotations and repetitive text.

    It searches for an earlier occurrence of the last tokens. It uses the longest match, and among equals the latest.
    """

    dtype = "none"
    num_blocks = num_used_blocks = block_size = 0  # there is no model, so no KV cache

    def __init__(self, vocab_size: int, limits: StepLimits, longest: int = _LONGEST_RUN) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = limits.max_model_len
        self._max_num_seqs = limits.max_num_seqs
        self._max_new_tokens = limits.max_num_batched_tokens  # tokens to index per step: all sequences wait meanwhile
        self._lengths = range(longest, 0, -1)
        self._indices: dict[DraftSequence, _Index] = {}

    @property
    def free_tokens(self) -> int | None:
        return 0 if len(self._indices) >= self._max_num_seqs else None

    def admit(self, sequence: DraftSequence) -> bool:
        if len(self._indices) >= self._max_num_seqs or len(sequence.token_ids) >= self.max_model_len:
            return False
        self._indices[sequence] = _Index(self._lengths)
        return True

    def draft(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        budget = self._max_new_tokens
        for sequence in sorted(sequences, key=self._num_new_tokens):
            index = self._indices[sequence]
            num_new = self._num_new_tokens(sequence)
            index.extend(sequence.token_ids, sequence.num_committed - max(0, num_new - budget))
            budget = max(0, budget - num_new)
            if index.num_tokens < sequence.num_committed:
                continue
            end = min(sequence.num_committed + sequence.window, self.max_model_len)
            start = index.find(sequence.token_ids)
            if start is None:
                sequence.is_exhausted = True
            else:
                # If the match reaches the end of the tokens, its continuation is the text just proposed: it repeats.
                for offset in range(end - len(sequence.token_ids)):
                    sequence.append(sequence.token_ids[start + offset])
        return []

    def _num_new_tokens(self, sequence: DraftSequence) -> int:
        return sequence.num_committed - self._indices[sequence].num_tokens

    def rewind(self, sequence: DraftSequence, kept: Sequence[int]) -> None:
        """Does nothing: only committed tokens are in the index."""

    def release(self, sequence: DraftSequence) -> None:
        del self._indices[sequence]


class _Index:
    """Index from each run of tokens to the position of the token that last followed it."""

    def __init__(self, lengths: range) -> None:
        self._lengths = lengths
        self._next: dict[tuple[int, ...], int] = {}  # a run of tokens → index of the token that follows it
        self.num_tokens = 0  # number of indexed tokens

    def extend(self, token_ids: Sequence[int], num_tokens: int) -> None:
        """Indexes the first `num_tokens` tokens. Runs that end with the last one wait for the token after it."""
        for end in range(max(1, self.num_tokens), num_tokens):
            for length in self._lengths:
                if length <= end:
                    self._next[tuple(token_ids[end - length : end])] = end
        self.num_tokens = max(self.num_tokens, num_tokens)

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Returns the position after the latest earlier occurrence of the longest run that ends `token_ids`.

        Returns None if no run occurred before.
        """
        for length in self._lengths:
            start = self._next.get(tuple(token_ids[-length:])) if length <= len(token_ids) else None
            if start is not None:
                return start
        return None
