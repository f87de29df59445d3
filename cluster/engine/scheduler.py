"""Decides what the next step of the target computes: continuous batching with chunked prefill and preemption."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.engine.batch import Segment
from cluster.engine.blocks import BlockManager
from cluster.engine.sequence import Sequence
from cluster.speculation.drafts import Drafts

# Share of all blocks that admission leaves to the sequences that run, to grow into.
_WATERMARK = 0.01


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part of a step."""

    sequence: Sequence
    num_new_tokens: int  # committed tokens whose KV this step computes
    drafts: Drafts = field(default_factory=Drafts)  # verified after the last committed token, when it is computed

    @property
    def yields_choices(self) -> bool:
        """Whether the step computes the last committed token, so that the next can be chosen."""
        return self.sequence.num_computed_tokens + self.num_new_tokens == len(self.sequence.token_ids)

    @property
    def num_choices(self) -> int:
        return len(self.drafts) + 1 if self.yields_choices else 0

    @property
    def parents(self) -> list[int] | None:
        """Of the last committed token and the drafts, when these are a tree."""
        parents = self.drafts.parents
        return None if parents is None else [-1, *(parent + 1 for parent in parents)]

    def segment(self) -> Segment:
        start = self.sequence.num_computed_tokens
        new_tokens = self.sequence.token_ids[start : start + self.num_new_tokens]
        return Segment(
            token_ids=[*new_tokens, *self.drafts.token_ids],
            num_computed_tokens=start,
            block_table=self.sequence.block_table,
            num_logits=self.num_choices,
            parents=self.parents,
        )


class Scheduler:
    """First come, first served; blocks are taken as sequences grow.

    A sequence is admitted when there are blocks for the tokens it has. When blocks run out, admission waits; then
    drafts are given up; then the youngest sequence is preempted: it gives its blocks back and waits, before all
    others, to be computed again. What it generates stays the same, as its noise depends on its positions alone.

    `running` and then `waiting` are in the order of arrival.
    """

    def __init__(self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        # Every decoding sequence gets its row in every step.
        assert max_num_batched_tokens >= max_num_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._watermark = max(1, round(_WATERMARK * blocks.num_blocks))

    def fits(self, max_len: int) -> bool:
        """Whether a sequence of at most `max_len` tokens can run. Its drafts take only what room there is."""
        return self._blocks.num_blocks_for(max_len) <= self._blocks.num_blocks

    def add(self, sequence: Sequence) -> None:
        """`sequence`, which must fit, waits for admission."""
        assert self.fits(sequence.max_len)
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Moves waiting sequences to running while there is room; returns them."""
        admitted: list[Sequence] = []
        while self.waiting and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            # One that runs alone may take the whole cache.
            reserve = self._watermark if self.running else 0
            allocated = self._blocks.allocate_for(sequence.token_ids, len(sequence.token_ids), reserve=reserve)
            if allocated is None:
                break
            sequence.block_table, sequence.num_computed_tokens = allocated
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

    def schedule(
        self, drafts_of: Callable[[Sequence], Drafts], is_held_back: Callable[[Sequence], bool] = lambda _: False
    ) -> list[ScheduledSequence]:
        """The next step: every decoding sequence's token, then drafts, then prefill, within the token budget.

        `drafts_of` gives the drafts that are there for a sequence. While prompts wait, drafts get at most half
        of what the budget leaves, so that a busy step cannot starve prefill. Decoding sequences that are held back
        take no part.
        """
        may_grow = self._make_room()
        decoding = [s for s in self.running if not s.is_prefilling and not is_held_back(s)]
        prefilling = [s for s in self.running if s.is_prefilling]
        budget = self._max_num_batched_tokens - len(decoding)
        draft_budget = budget // 2 if prefilling else budget
        step: list[ScheduledSequence] = []
        for sequence in decoding:
            drafts = drafts_of(sequence).within(sequence.max_useful_drafts).first(draft_budget)
            if drafts:
                drafts = self._place(drafts, sequence, may_grow=may_grow)
            draft_budget -= len(drafts)
            budget -= len(drafts)
            step.append(ScheduledSequence(sequence, 1, drafts))
        for sequence in prefilling:
            chunk = min(len(sequence.token_ids) - sequence.num_computed_tokens, budget)
            if chunk == 0:
                break
            budget -= chunk
            step.append(ScheduledSequence(sequence, chunk))
        return step

    def advance(self, scheduled: ScheduledSequence, num_accepted: int = 0) -> None:
        """The step has run: counts its new tokens and accepted drafts, which are committed by now, as computed."""
        sequence = scheduled.sequence
        num_computed = sequence.num_computed_tokens + scheduled.num_new_tokens + num_accepted
        # An end-of-sequence token inside the drafts leaves those after it uncommitted.
        sequence.num_computed_tokens = min(num_computed, len(sequence.token_ids))
        self._blocks.cache(sequence.block_table, sequence.token_ids, sequence.num_computed_tokens)

    def _make_room(self) -> bool:
        """Gives every running sequence, the oldest first, the blocks of its committed tokens, whatever that takes.

        Returns whether that was possible without taking any back. If not, drafts have only what is left of the
        blocks that their sequences hold.
        """
        is_short = False
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            if self._blocks.grow(sequence.block_table, len(sequence.token_ids)):
                index += 1
            elif not is_short:
                is_short = True
                for other in self.running:
                    self._blocks.shrink(other.block_table, len(other.token_ids))
            else:
                self._preempt_youngest()
        return not is_short

    def _place(self, drafts: Drafts, sequence: Sequence, *, may_grow: bool) -> Drafts:
        """The part of `drafts` that there is room for after the tokens of `sequence`; takes the blocks for it."""
        blocks, length = self._blocks, len(sequence.token_ids)
        if may_grow and blocks.grow(sequence.block_table, length + len(drafts)):
            return drafts
        num_blocks = len(sequence.block_table) + (blocks.num_available_blocks if may_grow else 0)
        drafts = drafts.first(num_blocks * blocks.block_size - length)
        blocks.grow(sequence.block_table, length + len(drafts))
        return drafts

    def _preempt_youngest(self) -> None:
        sequence = self.running.pop()
        self._blocks.free(sequence.block_table)
        sequence.num_computed_tokens = 0
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1
