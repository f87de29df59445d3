"""A drafter with a small model. It proposes the model's own choices under the target's noise."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from cluster.drafters.base import Drafter, DraftSequence
from cluster.drafters.proposable import Proposable
from cluster.drafters.read_tokens import NUM_SINKS, ContextTokens, ReadTokens
from cluster.engine.batch import Segment
from cluster.engine.limits import StepLimits
from cluster.engine.prompt_pace import PromptPace, PromptPart
from cluster.engine.runner import ModelRunner
from cluster.speculation.sampling import Sampler, SampleRequest
from cluster.speculation.token_counts import TokenCounts
from cluster.telemetry.metrics import Reading
from cluster.vocabulary_map import VocabularyMap

if TYPE_CHECKING:
    from cluster.drafters.burst import Burst  # PyTorch's builds for CPUs come without Triton, which it needs


@dataclass(slots=True)
class Cache:
    """KV cache of one sequence. The nodes of the tree have the places after the committed tokens, in their order."""

    block_table: MutableSequence[int]
    num_computed_tokens: int  # computed tokens among the committed tokens; all of these if there are drafts
    root: bytes | None  # root of the hashes of the blocks
    tokens: ReadTokens  # the tokens that have places in the cache, including drafts
    computed_nodes: set[int] = field(default_factory=set)
    counts: TokenCounts | None = None  # counts of the committed tokens, for penalties


@dataclass(slots=True)
class LevelStep:
    segments: list[Segment] = field(default_factory=list)
    # For each node that is extended: its sequence, the node, and its number of rows of logits.
    extended: list[tuple[DraftSequence, int, int]] = field(default_factory=list)
    num_rows: int = 0

    def add(self, segment: Segment) -> None:
        self.segments.append(segment)
        self.num_rows += len(segment.token_ids)


class ModelDrafter(Drafter):
    """Drafts with a model of the PyTorch engine.

    `admit` allocates blocks for a sequence's tokens and window; `draft` allocates more as the sequence grows. `draft`
    returns the sequences that cannot grow.

    With `context_tokens`, the model reads only the first `NUM_SINKS` and the last `context_tokens` tokens of a longer
    sequence when it is admitted, and all tokens that follow. When these fill the model's context, it begins again with
    the first and last tokens, at most half of the context. Noise and penalties remain those of the whole sequence.
    """

    def __init__(
        self,
        runner: ModelRunner,
        limits: StepLimits,
        burst: Burst | None = None,
        vocabulary: VocabularyMap | None = None,
        *,
        context_tokens: ContextTokens = None,
    ) -> None:
        """`burst`: draws all tokens of owed chains on the device; None: one token per step.

        `vocabulary`: if not None, the model was loaded with its `rows`.
        """
        self.max_model_len = limits.max_model_len
        self.vocab_size = runner.model.config.vocab_size if vocabulary is None else vocabulary.num_ids
        self.vocabulary = vocabulary
        self.dtype = str(runner.model.dtype).removeprefix("torch.")
        self.num_blocks = runner.blocks.num_blocks
        self.block_size = runner.blocks.block_size
        self._runner = runner
        self._sampler = Sampler(runner.model.device)
        self._proposable = Proposable(vocabulary, runner.model.device)
        self._limits = limits
        self._burst = burst
        self.context_tokens = context_tokens
        self._pace = PromptPace(limits.max_prefill_seconds, limits.max_num_batched_tokens)
        self._caches: dict[DraftSequence, Cache] = {}

    @property
    def num_used_blocks(self) -> int:
        return self._runner.blocks.num_used_blocks

    @property
    def free_tokens(self) -> int:
        if len(self._caches) >= self._limits.max_num_seqs:
            return 0
        return self._runner.blocks.num_available_blocks * self.block_size

    def prompt_seconds(self, num_tokens: int) -> float:
        return self._pace.seconds([PromptPart(num_tokens, 0)])

    def readings(self) -> Iterable[Reading]:
        return self._runner.blocks.readings()

    def admit(self, sequence: DraftSequence) -> bool:
        if len(self._caches) >= self._limits.max_num_seqs:
            return False
        return self._allocate(sequence, sequence.token_ids, len(sequence.token_ids))

    def draft(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        started_at = time.perf_counter()
        prompts: list[DraftSequence] = []
        others: list[DraftSequence] = []
        without_room: list[DraftSequence] = []
        for sequence in sequences:
            if not self._grow(sequence):
                without_room.append(sequence)
            elif self._num_uncomputed(sequence) > self._num_round_tokens(sequence):
                prompts.append(sequence)
            else:
                others.append(sequence)
        budget = self._limits.max_num_batched_tokens
        left = [PromptPart(self._num_prompt_rows(s), self._caches[s].num_computed_tokens) for s in prompts]
        for_others = budget - min(sum(part.num_tokens for part in left), budget // 2)
        step = LevelStep()
        for sequence in others:
            self._add(step, sequence, for_others - step.num_rows)
        shares = self._pace.share(left, budget - step.num_rows, self._pace.budget(is_alone=False))
        for sequence, num_tokens in zip(prompts, shares, strict=True):
            self._add(step, sequence, num_tokens)
        chunks = [
            PromptPart(num_tokens, part.num_before) for num_tokens, part in zip(shares, left, strict=True) if num_tokens
        ]
        if step.segments:
            logits = self._proposable(self._run(step))
            burst = None if prompts else self._burst
            if burst is None or not self._may_burst(burst, step.extended):
                self._extend(step.extended, logits)
            else:
                self._extend_by(burst, [sequence for sequence, *_ in step.extended], logits)
            if not step.extended:
                self._runner.wait()  # otherwise the time of this step would be measured as part of the next one
            self.num_step_rows = step.num_rows
            self._pace.observe(step.num_rows, chunks, time.perf_counter() - started_at)
        return without_room

    def rewind(self, sequence: DraftSequence, kept: Sequence[int]) -> None:
        cache = self._caches[sequence]
        if self.context_tokens is not None and sequence.room(self.max_model_len) <= 0:
            sequence.drop_drafts()
            self._begin_again(sequence, sequence.token_ids, sequence.num_committed)
            return
        if not kept:
            cache.computed_nodes.clear()
            return
        is_computed = [node in cache.computed_nodes for node in kept]
        # There were drafts, so all tokens before them are computed. The last of the kept nodes may have no slots yet.
        num_with_slots = max((place + 1 for place, computed in enumerate(is_computed) if computed), default=0)
        self._runner.keep(cache.block_table, cache.num_computed_tokens, kept[:num_with_slots])
        num_committed = min(len(kept), self._num_uncomputed(sequence))
        # The last accepted draft may not be computed. In this case it has no descendants.
        cache.num_computed_tokens += sum(is_computed[:num_committed])
        cache.computed_nodes = {node for node, computed in enumerate(is_computed[num_committed:]) if computed}

    def release(self, sequence: DraftSequence) -> None:
        self._runner.blocks.free(self._caches.pop(sequence).block_table)

    def _allocate(self, sequence: DraftSequence, token_ids: Sequence[int], num_certain: int) -> bool:
        """Adds a cache for `token_ids`, the tokens of `sequence`, and its window. Returns False if it does not fit.

        Shares blocks only of the first `num_certain` tokens.
        """
        root = self._root(sequence)
        for tokens in self._read_tokens(sequence, token_ids, num_certain):
            if len(tokens) >= self.max_model_len:
                continue
            num_tokens = min(len(tokens) + sequence.window, self.max_model_len)
            certain = tokens[: num_certain - tokens.num_skipped]
            allocated = self._runner.blocks.allocate_for(certain, num_tokens, root=root)
            if allocated is not None:
                self._caches[sequence] = Cache(*allocated, root, tokens)
                sequence.num_skipped = max(0, sequence.num_committed - len(tokens))
                return True
        return False

    def _read_tokens(self, sequence: DraftSequence, token_ids: Sequence[int], num_certain: int) -> Iterator[ReadTokens]:
        """Yields what to read of `token_ids`, the tokens of `sequence`, the preferred choice first.

        All tokens are read instead if that computes no more of them. The skipped tokens are among the first
        `num_certain`.
        """
        for num_last in self.contexts(sequence):
            num_skipped = 0 if num_last is None else min(len(token_ids) - num_last, num_certain) - NUM_SINKS
            if num_last is None or num_skipped <= 0:
                yield ReadTokens(token_ids)
                continue
            if len(token_ids) - self._runner.blocks.num_cached_tokens(token_ids, self._root(sequence)) <= num_last:
                yield ReadTokens(token_ids)
            yield ReadTokens(token_ids, num_skipped, NUM_SINKS)

    def _begin_again(self, sequence: DraftSequence, token_ids: Sequence[int], num_certain: int) -> None:
        """Empties the full cache of `sequence`; the next steps compute the first and last of `token_ids`.

        The skipped tokens are among the first `num_certain`.
        """
        cache = self._caches[sequence]
        self._runner.blocks.free(cache.block_table)
        num_skipped = min(len(token_ids) - self.num_last_again(sequence), num_certain) - NUM_SINKS
        tokens = ReadTokens(token_ids, max(0, num_skipped), NUM_SINKS)
        self._caches[sequence] = Cache(cache.block_table, 0, cache.root, tokens, counts=cache.counts)
        sequence.num_skipped = max(0, sequence.num_committed - len(tokens))

    def _run(self, step: LevelStep) -> torch.Tensor:
        """Returns the logits of `step`, [num_logit_rows, the model's vocabulary]."""
        return self._runner.run(step.segments)

    def _root(self, sequence: DraftSequence) -> bytes | None:
        """Returns the root of the hashes of the sequence's blocks."""
        return sequence.cache_root or None

    def _grow(self, sequence: DraftSequence) -> bool:
        """Allocates blocks for all tokens of `sequence`. Returns False if too few are free."""
        cache, blocks = self._caches[sequence], self._runner.blocks
        if not blocks.grow(cache.block_table, len(cache.tokens)):
            return False
        blocks.cache(cache.block_table, cache.tokens, cache.num_computed_tokens, cache.root)
        return True

    def _num_uncomputed(self, sequence: DraftSequence) -> int:
        return sequence.num_committed - sequence.num_skipped - self._caches[sequence].num_computed_tokens

    def _num_round_tokens(self, sequence: DraftSequence) -> int:
        """Returns the maximum number of uncomputed tokens after a round.

        A sequence with more uncomputed tokens counts as one whose prompt is being computed.
        """
        return sequence.window + 1

    def _num_prompt_rows(self, sequence: DraftSequence) -> int:
        """Returns the number of rows that the sequence needs before its first draft."""
        return self._num_uncomputed(sequence)

    def _add(self, step: LevelStep, sequence: DraftSequence, most: int) -> None:
        """Adds at most `most` rows of `sequence` to `step`."""
        if most > 0:
            segment, nodes = _next_segment(sequence, self._caches[sequence], most)
            step.add(segment)
            step.extended.extend((sequence, node, 1) for node in nodes)

    def _count(self, sequence: DraftSequence) -> TokenCounts | None:
        if not sequence.params.has_penalty:
            return None
        cache = self._caches[sequence]
        if cache.counts is None:
            cache.counts = TokenCounts(self.vocab_size, self._runner.model.device)
        cache.counts.count(sequence.token_ids, sequence.num_committed, sequence.num_prompt_tokens)
        return cache.counts

    def _may_burst(self, burst: Burst, extended: Sequence[tuple[DraftSequence, int, int]]) -> bool:
        """Returns True if all sequences of a step are chains without penalties, and some need more than one token."""
        return len(extended) <= burst.max_rows and (
            all(
                node == sequence.tip
                and sequence.is_chain
                and sequence.width == 1
                and sequence.shape is None
                and not (sequence.params.has_penalty or sequence.params.logit_bias)
                for sequence, node, _ in extended
            )
            and any(self._num_to_draft(sequence) > 1 for sequence, *_ in extended)
        )

    def _num_to_draft(self, sequence: DraftSequence) -> int:
        """Returns the number of tokens that complete a chain's proposal; 1 if it is complete, to run ahead."""
        room = sequence.room(self.max_model_len)
        return max(1, min(sequence.num_owed, room) - sequence.num_drafted)

    def _extend_by(self, burst: Burst, sequences: Sequence[DraftSequence], logits: torch.Tensor) -> None:
        """Adds the owed tokens to every chain; only one token to a chain without blocks for more."""
        owed = []
        for sequence in sequences:
            count, cache = self._num_to_draft(sequence), self._caches[sequence]
            has_room = self._runner.blocks.grow(cache.block_table, len(cache.tokens) + count - 1)
            owed.append(count if has_room else 1)
        requests = [
            SampleRequest(s.params, s.noise_key, s.token_ids, s.num_prompt_tokens, position_shift=-s.num_added)
            for s in sequences
        ]
        tables = [self._caches[sequence].block_table for sequence in sequences]
        num_skipped = [sequence.num_skipped for sequence in sequences]
        for sequence, drawn in zip(sequences, burst.run(logits, requests, tables, owed, num_skipped), strict=True):
            for index, token in enumerate(drawn):
                if index:  # the previous token was an input of the step
                    self._caches[sequence].computed_nodes.add(sequence.tip)
                sequence.append(token)

    def _extend(self, extended: Sequence[tuple[DraftSequence, int, int]], logits: torch.Tensor) -> None:
        """Gives every node its children: the best tokens under the target's noise."""
        if not extended:
            return
        requests = [
            SampleRequest(
                s.params,
                s.noise_key,
                s.tokens_to(node),
                s.num_prompt_tokens,
                counts=self._count(s),
                position_shift=-s.num_added,
            )
            for s, node, _ in extended
        ]
        width = max(sequence.width for sequence, *_ in extended)
        if width == 1:
            for (sequence, node, _), choice in zip(extended, self._sampler.sample(logits, requests), strict=True):
                sequence.extend(node, [choice], [0.0])
            return
        best = self._sampler.best_choices(logits, requests, width)
        for (sequence, node, _), (token_ids, gaps) in zip(extended, best, strict=True):
            sequence.extend(node, token_ids[: sequence.width], gaps[: sequence.width])


def _next_segment(sequence: DraftSequence, cache: Cache, budget: int) -> tuple[Segment, list[int]]:
    """Returns the rows of `sequence` in this step, at most `budget`, and the nodes that get children from them."""
    start, end = cache.num_computed_tokens, sequence.num_committed - sequence.num_skipped
    if start < end:
        is_complete = end <= start + budget
        cache.num_computed_tokens = end = min(end, start + budget)
        segment = Segment(cache.tokens[start:end], start, cache.block_table, num_logits=int(is_complete))
        return segment, [-1] if is_complete else []
    nodes = (sequence.to_extend or [sequence.tip])[:budget]
    assert cache.computed_nodes.isdisjoint(nodes)
    cache.computed_nodes.update(nodes)
    token_ids = [sequence.token_of(node) for node in nodes]
    if sequence.is_chain:
        return Segment(token_ids, end + nodes[0], cache.block_table, num_logits=1), nodes
    return Segment(token_ids, end, cache.block_table, len(nodes), sequence.parents, nodes), nodes
