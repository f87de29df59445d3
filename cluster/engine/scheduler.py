"""Schedules the target's next step: continuous batching with chunked prefill and preemption."""

from __future__ import annotations

import bisect
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Generic, TypeVar

from cluster.engine.batch import Segment
from cluster.engine.blocks import BlockManager
from cluster.engine.fair_queue import FairQueue
from cluster.engine.limits import StepLimits
from cluster.engine.prompt_pace import PromptPace, PromptPart
from cluster.engine.sequence import Sequence
from cluster.speculation.drafts import NO_DRAFTS, Drafts
from cluster.telemetry.metrics import Reading

# Share of the blocks that admission reserves for the growth of running sequences.
_WATERMARK = 0.01
# Tokens of an owner's prompts in the first turn (`_in_turns`): shorter prompts are computed in a step or two anyway.
_TURN_TOKENS = 1024

SequenceT = TypeVar("SequenceT", bound=Sequence)


@dataclass(frozen=True, slots=True)
class ScheduledSequence(Generic[SequenceT]):
    """One sequence's part of a step."""

    sequence: SequenceT
    start: int  # index of the first token whose KV this step computes; the highest possible one if it is unread
    num_new_tokens: int  # tokens whose KV this step computes, without drafts
    yields_choices: bool  # True if the step computes the last token, so that the next can be chosen
    drafts: Drafts = field(default_factory=Drafts)  # drafts after the last committed token that this step verifies

    @property
    def has_unread_input(self) -> bool:
        """True if the input is a choice of the previous step that the host has not read yet."""
        return self.start >= len(self.sequence.token_ids)

    @property
    def end(self) -> int:
        """Index after the last new token."""
        return self.start + self.num_new_tokens

    @property
    def num_choices(self) -> int:
        return len(self.drafts) + 1 if self.yields_choices else 0

    @property
    def num_scored(self) -> int:
        """Number of leading rows of logits that score prompt tokens instead of yielding a choice."""
        first_row = self._first_scored_row
        if first_row is None:
            return 0
        return max(0, min(self.end, self.sequence.num_prompt_tokens - 1) - first_row)

    @property
    def num_logits(self) -> int:
        """Number of rows of the sequence that yield logits; these are its last rows.

        The first `num_scored` of these rows score prompt tokens. The last `num_choices` yield choices.
        """
        first_row = self._first_scored_row
        if first_row is None or not self.num_scored:
            return self.num_choices
        return self.end - first_row + len(self.drafts)

    @property
    def _first_scored_row(self) -> int | None:
        """Place of this step's first token whose logits score the next prompt token; None: no token is scored."""
        sequence = self.sequence
        if not sequence.is_scoring:
            return None
        assert sequence.first_unscored is not None
        return max(sequence.first_unscored - 1, self.start)

    @property
    def parents(self) -> list[int] | None:
        """Parents of the last committed token and of the drafts; None for a chain."""
        parents = self.drafts.parents
        return None if parents is None else [-1, *(parent + 1 for parent in parents)]

    def segment(self, stand_in: int | None = None) -> Segment:
        """Returns the input of the step. `stand_in`: the input token, if it is unread (`Unread`)."""
        new_tokens = self.sequence.token_ids[self.start : self.end] if stand_in is None else [stand_in]
        return Segment(
            token_ids=[*new_tokens, *self.drafts.token_ids],
            num_computed_tokens=self.start,
            block_table=self.sequence.block_table,
            num_logits=self.num_logits,
            parents=self.parents,
        )


class Scheduler(Generic[SequenceT]):
    """Schedules the owners' sequences fairly (`FairQueue`). Allocates blocks as sequences grow.

    A sequence is admitted if there are blocks for its present tokens. When blocks run out, admission waits first. Then
    drafts are dropped. Then the last sequence of the owner with the most is preempted: it gives its blocks back, and
    waits before the owner's others of its priority until it is computed again. Its output stays the same, because its
    noise depends only on positions.

    A step may be scheduled before the previous one has ended. The tokens of the previous step are then unread.

    `running` is ordered by urgency, and within it by admission.
    """

    def __init__(self, blocks: BlockManager, limits: StepLimits, max_scored_tokens: int = sys.maxsize) -> None:
        """`max_scored_tokens`: maximum tokens per step of a scored prompt, because all of these need logits."""
        # Every decoding sequence has a row in every step.
        assert limits.max_num_batched_tokens >= limits.max_num_seqs
        num_kv_tokens = blocks.num_blocks * blocks.block_size
        self.waiting: FairQueue[SequenceT] = FairQueue(attrgetter("owner"), limits.max_num_seqs, num_kv_tokens)
        self.running: list[SequenceT] = []
        self.num_preemptions = 0
        self.pace = PromptPace(limits.max_prefill_seconds, limits.max_num_batched_tokens, limits.first_token_limit)
        self._blocks = blocks
        self._limits = limits
        self._max_scored_tokens = max_scored_tokens
        self._watermark = watermark(blocks.num_blocks)

    def fits(self, max_len: int) -> bool:
        """Returns True if the cache has enough blocks for a sequence of `max_len` tokens; drafts do not count."""
        return self._blocks.num_blocks_for(max_len) <= self._blocks.num_blocks

    def add(self, sequence: SequenceT) -> None:
        """Queues `sequence`, which must fit, for admission."""
        assert self.fits(sequence.max_len)
        self.waiting.add(sequence)

    def admit(self) -> list[SequenceT]:
        """Moves waiting sequences to `running` while there is room, or others make some. Returns the admitted ones."""
        admitted: list[SequenceT] = []
        preempted: list[SequenceT] = []  # a step that has not ended may still have a part of them
        while self.waiting and (sequence := self.waiting.first(self.running)) not in preempted:
            if self._allocate(sequence):
                self.waiting.take(sequence)
                bisect.insort_right(self.running, sequence, key=self.waiting.urgency)
                admitted.append(sequence)
            elif yielding := self.waiting.who_yield(self.running, self._is_enough_for(sequence)):
                for other in yielding:
                    self._preempt(other)
                preempted += yielding
            else:
                break
        return [sequence for sequence in admitted if sequence not in preempted]

    def _is_enough_for(self, sequence: SequenceT) -> Callable[[Collection[SequenceT]], bool]:
        """Returns the function that says whether there is room for `sequence` without some of those that run."""
        num_blocks, tokens = self._blocks.num_blocks_for(len(sequence.token_ids)), sequence.token_ids
        prefix = cache(lambda: () if sequence.is_scoring else self._blocks.cached_prefix(tokens, sequence.cache_root))

        def is_enough(yielding: Collection[SequenceT]) -> bool:
            num_running = len(self.running) - len(yielding)
            if num_running >= self._limits.max_num_seqs:
                return False
            given_back, num_needed = [s.block_table for s in yielding], num_blocks + self._reserve(num_running)
            num_available = self._blocks.num_available_for((), given_back)
            return num_needed <= num_available or num_needed <= self._blocks.num_available_for(prefix(), given_back)

        return is_enough

    def _reserve(self, num_running: int) -> int:
        """Blocks that admission leaves free. A sequence that runs alone may use the whole cache."""
        return self._watermark if num_running else 0

    def _allocate(self, sequence: SequenceT) -> bool:
        """Gives `sequence` its blocks. Returns False if there is no place or there are too few blocks."""
        if len(self.running) >= self._limits.max_num_seqs:
            return False
        allocated = self._blocks.allocate_for(
            sequence.token_ids,
            len(sequence.token_ids),
            reserve=self._reserve(len(self.running)),
            root=sequence.cache_root,
            uses_cache=not sequence.is_scoring,  # cached tokens have no logits
        )
        if allocated is None:
            return False
        sequence.block_table, sequence.num_computed_tokens = allocated
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        return True

    def remove(self, *sequences: SequenceT) -> None:
        """Removes `sequences`, running or waiting, in one pass, because there may be thousands."""
        gone = set(sequences)
        running = [sequence for sequence in self.running if sequence in gone]
        for sequence in running:
            self.running.remove(sequence)
            self._blocks.free(sequence.block_table)
        if len(running) < len(gone) and self.waiting.remove(gone) + len(running) != len(gone):
            raise ValueError("the sequence to remove is neither running nor waiting")

    def schedule(
        self, drafts_of: Callable[[SequenceT], Drafts], postponed: Collection[SequenceT] = ()
    ) -> list[ScheduledSequence[SequenceT]]:
        """Returns the next step: every decoding sequence's token, then drafts, then prefill, within the token budget.

        Counts new tokens and drafts as computed, and choices as unread. When the step ends, the caller calls `advance`
        for each part or removes the part's sequence. Sequences in `postponed` do not decode in this step.

        `drafts_of` returns the drafts of a sequence that have arrived. While prompts wait, drafts get at most half of
        the remaining budget, so that drafts cannot starve prefill. `pace` divides the rest among the prompts of a turn.
        """
        may_grow = self._make_room()
        decoding = [(s, drafts_of(s)) for s in self.running if not (s.is_prefilling or s.will_end or s in postponed)]
        prefilling = [s for s in self.running if s.is_prefilling]
        budget = self._limits.max_num_batched_tokens - len(decoding)
        draft_budget = budget // 2 if prefilling else budget
        step: list[ScheduledSequence[SequenceT]] = []
        for sequence, offered in decoding:
            drafts = offered.within(sequence.max_useful_drafts).first(draft_budget)
            if drafts:
                drafts = self._place(drafts, sequence, may_grow=may_grow)
            draft_budget -= len(drafts)
            budget -= len(drafts)
            step.append(_schedule(sequence, 1, drafts))
        seconds = self.pace.budget(
            is_alone=len(prefilling) == 1 and not step,
            prompts=(PromptPart(self._longest_chunk(s), s.num_computed_tokens) for s in prefilling),
            num_rows=self._limits.max_num_batched_tokens - budget,
        )
        for sequences in self._in_turns(prefilling):
            prompts = [PromptPart(self._longest_chunk(s), s.num_computed_tokens) for s in sequences]
            chunks = self.pace.share(prompts, budget, seconds)
            budget -= sum(chunks)
            seconds -= self.pace.seconds(
                [PromptPart(chunk, prompt.num_before) for chunk, prompt in zip(chunks, prompts, strict=True)]
            )
            step += [_schedule(s, chunk, NO_DRAFTS) for s, chunk in zip(sequences, chunks, strict=True) if chunk]
        return step

    def advance(self, scheduled: ScheduledSequence[SequenceT], num_accepted: int = 0, num_committed: int = 0) -> None:
        """Ends one part of a step: its choices no longer count as unread, its rejected drafts not as computed.

        Must be called after the part's `num_committed` tokens are committed.
        """
        sequence, num_drafts = scheduled.sequence, len(scheduled.drafts)
        sequence.num_unread_tokens -= scheduled.num_choices
        if not sequence.block_table:  # it was preempted when the next step was scheduled
            return
        num_accepted = min(num_accepted, num_committed)  # drafts after an end-of-sequence token are not committed
        sequence.num_computed_tokens -= num_drafts - num_accepted
        end = len(sequence.token_ids) - num_committed if scheduled.yields_choices else scheduled.end
        self._blocks.cache(sequence.block_table, sequence.token_ids, end + num_accepted, sequence.cache_root)

    def readings(self) -> Iterator[Reading]:
        """Returns the metrics of the scheduler. Thread-safe."""
        yield Reading("vllm:num_requests_running", "Sequences that hold KV blocks.", len(self.running))
        preempted = "Sequences preempted because blocks were missing."
        yield Reading("vllm:num_preemptions", preempted, self.num_preemptions, is_counter=True)

    def _in_turns(self, prefilling: list[SequenceT]) -> Iterator[list[SequenceT]]:
        """Yields the prompts of each turn; those of the next one get what is left of the budget.

        An owner's first tokens are in the first turn, and each further turn has as many as all before it. So neither
        long prompts nor many of one owner make a short one of another owner wait.
        """
        turn_of: dict[SequenceT, int] = {}
        num_before: Counter[bytes] = Counter()
        for sequence in sorted(prefilling, key=attrgetter("priority")):
            turn_of[sequence] = (num_before[sequence.owner] // _TURN_TOKENS).bit_length() if sequence.owner else 0
            num_before[sequence.owner] += sequence.num_tokens - sequence.num_computed_tokens
        turns: defaultdict[tuple[int, int], list[SequenceT]] = defaultdict(list)
        for sequence in prefilling:
            turns[self.waiting.urgency(sequence), turn_of[sequence]].append(sequence)
        yield from (turns[key] for key in sorted(turns))

    def _longest_chunk(self, sequence: Sequence) -> int:
        num_left = len(sequence.token_ids) - sequence.num_computed_tokens
        return min(num_left, self._max_scored_tokens) if sequence.is_scoring else num_left

    def _make_room(self) -> bool:
        """Allocates blocks for all tokens of every running sequence, oldest first; preempts if needed.

        Returns False if it had to take blocks back. In this case drafts may only use the blocks that their sequences
        already have.
        """
        is_short = False
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            if self._blocks.grow(sequence.block_table, sequence.num_tokens):
                index += 1
            elif not is_short:
                is_short = True
                for other in self.running:
                    self._blocks.shrink(other.block_table, other.num_tokens)
            else:
                last = next(self.waiting.from_last(self.running))
                index -= self.running.index(last) < index
                self._preempt(last)
        return not is_short

    def _place(self, drafts: Drafts, sequence: Sequence, *, may_grow: bool) -> Drafts:
        """Allocates blocks for drafts of `sequence`. Returns the part of `drafts` for which there is room."""
        blocks, length = self._blocks, sequence.num_tokens
        if may_grow and blocks.grow(sequence.block_table, length + len(drafts)):
            return drafts
        num_blocks = len(sequence.block_table) + (blocks.num_available_blocks if may_grow else 0)
        drafts = drafts.first(num_blocks * blocks.block_size - length)
        blocks.grow(sequence.block_table, length + len(drafts))
        return drafts

    def _preempt(self, sequence: SequenceT) -> None:
        self.running.remove(sequence)
        self._blocks.free(sequence.block_table)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.waiting.add(sequence, is_first=True)
        self.num_preemptions += 1


def watermark(num_blocks: int) -> int:
    """Returns the number of blocks, out of `num_blocks`, that admission reserves for running sequences."""
    return max(1, round(_WATERMARK * num_blocks))


def _schedule(sequence: SequenceT, num_new_tokens: int, drafts: Drafts) -> ScheduledSequence[SequenceT]:
    """Returns the part of a step that computes `num_new_tokens` tokens of `sequence`; counts it as computed."""
    start = sequence.num_computed_tokens
    yields_choices = start + num_new_tokens == sequence.num_tokens
    part = ScheduledSequence(sequence, start, num_new_tokens, yields_choices, drafts)
    sequence.num_computed_tokens += num_new_tokens + len(drafts)
    sequence.num_unread_tokens += part.num_choices
    return part
