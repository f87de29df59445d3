"""Decides what the next step of the target computes: continuous batching with chunked prefill."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cluster.engine.batch import Segment
from cluster.engine.blocks import BlockManager
from cluster.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part of a step."""

    sequence: Sequence
    num_new_tokens: int  # committed tokens whose KV this step computes
    draft_token_ids: list[int]  # verified after them; only when they reach the last committed token

    @property
    def yields_choices(self) -> bool:
        """Whether the step computes the last committed token, so that the next can be chosen."""
        return self.sequence.num_computed_tokens + self.num_new_tokens == len(self.sequence.token_ids)

    @property
    def num_choices(self) -> int:
        return len(self.draft_token_ids) + 1 if self.yields_choices else 0

    def segment(self) -> Segment:
        start = self.sequence.num_computed_tokens
        new_tokens = self.sequence.token_ids[start : start + self.num_new_tokens]
        return Segment(
            token_ids=new_tokens + self.draft_token_ids,
            num_computed_tokens=start,
            block_table=self.sequence.block_table,
            num_logits=self.num_choices,
        )


class Scheduler:
    """First come, first served. A sequence is admitted when blocks for all it may ever need are free."""

    def __init__(self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        # Every decoding sequence gets its row in every step.
        assert max_num_batched_tokens >= max_num_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens

    def num_blocks_needed(self, max_len: int, num_speculative_tokens: int) -> int:
        """Blocks for a sequence of `max_len` tokens with its speculative slots."""
        return self._blocks.num_blocks_for(max_len + num_speculative_tokens)

    def add(self, sequence: Sequence) -> None:
        """`sequence` waits for admission. It must fit in an empty cache."""
        needed = self.num_blocks_needed(sequence.max_len, sequence.num_speculative_tokens)
        assert needed <= self._blocks.num_blocks
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Moves waiting sequences to running while there is room; returns them."""
        admitted: list[Sequence] = []
        while self.waiting and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            blocks = self._blocks.allocate(self.num_blocks_needed(sequence.max_len, sequence.num_speculative_tokens))
            if blocks is None:
                break
            sequence.block_table = blocks
            self.running.append(self.waiting.popleft())
            admitted.append(sequence)
        return admitted

    def remove(self, sequence: Sequence) -> None:
        """`sequence` finished or was aborted, wherever it was."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._blocks.free(sequence.block_table)
        else:
            self.waiting.remove(sequence)

    def schedule(self, drafts_of: Callable[[Sequence], list[int]]) -> list[ScheduledSequence]:
        """The next step: every decoding sequence's token, then drafts, then prefill, within the token budget.

        `drafts_of` gives the drafts that are there for a sequence. While prompts wait, drafts get at most half
        of what the budget leaves, so that a busy step cannot starve prefill.
        """
        decoding = [s for s in self.running if not s.is_prefilling]
        prefilling = [s for s in self.running if s.is_prefilling]
        budget = self._max_num_batched_tokens - len(decoding)
        draft_budget = budget // 2 if prefilling else budget
        step: list[ScheduledSequence] = []
        for sequence in decoding:
            drafts = drafts_of(sequence)[: min(sequence.max_useful_drafts, draft_budget)]
            draft_budget -= len(drafts)
            budget -= len(drafts)
            step.append(ScheduledSequence(sequence, 1, drafts))
        for sequence in prefilling:
            chunk = min(len(sequence.token_ids) - sequence.num_computed_tokens, budget)
            if chunk == 0:
                break
            budget -= chunk
            step.append(ScheduledSequence(sequence, chunk, []))
        return step
