"""Prompt lookup: proposes the tokens that followed an earlier occurrence of the last tokens (Saxena, 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.drafters.base import Drafter, DraftSequence
from cluster.engine.limits import StepLimits
from cluster.speculation.suffix_index import SuffixIndex, Text, following

_MOST_TOKENS = 2**20  # that the index has room for: 32 MiB


class NgramDrafter(Drafter):
    """Drafter without a model, which proposes from the text so far: good for code, quotations and repetitive text.

    It searches for an earlier occurrence of the last tokens. It uses the longest match, and among equals the latest.
    """

    dtype = "none"
    num_blocks = num_used_blocks = block_size = 0  # there is no model, so no KV cache

    def __init__(self, vocab_size: int, limits: StepLimits) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = limits.max_model_len
        self._max_num_seqs = limits.max_num_seqs
        self._max_new_tokens = limits.max_num_batched_tokens  # tokens to index per step: all sequences wait meanwhile
        # With four slots a token few entries are overwritten.
        self._index = SuffixIndex(min(4 * limits.max_num_seqs * limits.max_model_len, _MOST_TOKENS))
        self._texts: dict[DraftSequence, Text] = {}

    @property
    def free_tokens(self) -> int | None:
        return 0 if len(self._texts) >= self._max_num_seqs else None

    def admit(self, sequence: DraftSequence) -> bool:
        if len(self._texts) >= self._max_num_seqs or len(sequence.token_ids) >= self.max_model_len:
            return False
        text = self._texts[sequence] = self._index.begin(b"", sequence.token_ids)
        text.owner = text.number.to_bytes(8)  # nothing is found in another text
        return True

    def draft(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        budget = self._max_new_tokens
        ready = []
        for sequence in sorted(sequences, key=self._num_new_tokens):
            text, num_new = self._texts[sequence], self._num_new_tokens(sequence)
            text.token_ids = sequence.token_ids
            self._index.take_in([(text, sequence.num_committed - max(0, num_new - budget))])
            budget = max(0, budget - num_new)
            if text.num_known == sequence.num_committed:
                ready.append(sequence)
        for sequence, match in zip(ready, self._index.find([self._texts[one] for one in ready]), strict=True):
            end = min(sequence.num_committed + sequence.window, self.max_model_len)
            if match is None:
                sequence.is_exhausted = True
                continue
            for token in following(match, self._texts[sequence], end - len(sequence.token_ids)):
                sequence.append(token)
        return []

    def _num_new_tokens(self, sequence: DraftSequence) -> int:
        return sequence.num_committed - self._texts[sequence].num_known

    def rewind(self, sequence: DraftSequence, kept: Sequence[int]) -> None:
        """Does nothing: only committed tokens are in the index."""

    def release(self, sequence: DraftSequence) -> None:
        self._index.drop(self._texts.pop(sequence))
