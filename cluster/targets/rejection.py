"""`acceptance: rejection`, for comparison: the target runs a copy of the draft to get its distribution."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass

import torch

from cluster.engine.batch import Segment
from cluster.engine.limits import StepLimits
from cluster.engine.runner import ModelRunner
from cluster.speculation.rejection import accept_by_rejection
from cluster.speculation.sampling import SampleRequest, probabilities
from cluster.targets.token_generator import Generation, Scheduled


@dataclass(slots=True)
class _Cache:
    """The KV cache of one sequence in the copy of the draft."""

    block_table: MutableSequence[int]
    num_computed_tokens: int = 0  # committed tokens


@dataclass(frozen=True, slots=True)
class _VerifiedChain:
    """Drafts of one sequence in a step."""

    rows: slice  # rows of the step's logits
    generation: Generation
    draft_token_ids: Sequence[int]
    cache: _Cache

    def sample_request(self, num_rows: int) -> SampleRequest:
        """Returns the request for the last committed token and the first `num_rows - 1` drafts."""
        return SampleRequest(
            params=self.generation.request.params,
            noise_key=self.generation.request.noise_key,
            token_ids=self.generation.token_ids,
            num_prompt_tokens=self.generation.num_prompt_tokens,
            num_rows=num_rows,
            draft_token_ids=self.draft_token_ids[: num_rows - 1],
        )


class RejectionSampler:
    """Verifies chains against the draft's distribution, which a copy of the draft model computes.

    Some sequences keep the target's own choices, which are equally exact: greedy sequences, sequences that are too long
    for the copy, and sequences for which the copy's cache has no room.
    """

    def __init__(self, draft: ModelRunner, limits: StepLimits) -> None:
        self._draft = draft
        self._limits = limits
        self._caches: dict[Generation, _Cache] = {}

    def revise(
        self,
        choices: list[int],
        logits: torch.Tensor,
        step: Sequence[Scheduled],
    ) -> list[int]:
        """Returns the target's `choices`, with the rows of verified chains replaced.

        `logits` [num_rows, vocab_size] has a row for each choice. The choices of a verified chain become the accepted
        drafts and the token after them; the remaining choices of the chain are meaningless.
        """
        for generation in [generation for generation in self._caches if not generation.block_table]:
            self.forget(generation)  # an empty block table: the generation was preempted
        chains = self._chains(step)
        if not chains:
            return choices
        revised = list(choices)
        draft_probabilities = self._draft_probabilities(chains)
        start = 0
        for verified in chains:
            num_drafts, num_tokens = len(verified.draft_token_ids), len(verified.generation.token_ids)
            committed = accept_by_rejection(
                verified.draft_token_ids,
                probabilities(logits[verified.rows], [verified.sample_request(num_drafts + 1)]),
                draft_probabilities[start : start + num_drafts],
                verified.generation.request.noise_key,
                num_tokens,
            )
            start += num_drafts
            revised[verified.rows] = committed + committed[-1:] * (num_drafts + 1 - len(committed))
            # The copy has read all drafts except the last.
            verified.cache.num_computed_tokens = num_tokens + min(len(committed) - 1, num_drafts - 1)
        return revised

    def forget(self, generation: Generation) -> None:
        """Frees the blocks of `generation`. A later step computes all of its tokens again."""
        cache = self._caches.pop(generation, None)
        if cache is not None:
            self._draft.blocks.free(cache.block_table)

    def _chains(self, step: Sequence[Scheduled]) -> list[_VerifiedChain]:
        """Returns the chains of `step` that the copy verifies: sampled drafts, with room in its cache."""
        chains: list[_VerifiedChain] = []
        start = 0
        for scheduled in step:
            rows = slice(start, start + scheduled.num_choices)
            start = rows.stop
            drafts, generation = scheduled.drafts, scheduled.sequence
            num_tokens = len(generation.token_ids) + len(drafts) - 1
            if not drafts or generation.request.params.is_greedy or num_tokens > self._limits.max_model_len:
                continue
            assert drafts.parents is None, "rejection verifies chains only"
            cache = self._caches.setdefault(generation, _Cache([]))
            if self._draft.blocks.grow(cache.block_table, num_tokens):
                chains.append(_VerifiedChain(rows, generation, drafts.token_ids, cache))
        return chains

    def _draft_probabilities(self, chains: Sequence[_VerifiedChain]) -> torch.Tensor:
        """Returns the distribution from which each draft was sampled: float32 [drafts of all chains, vocab_size]."""
        segments: list[Segment] = []
        for verified in chains:
            self._catch_up(verified)
            start, inputs = verified.cache.num_computed_tokens, verified.draft_token_ids[:-1]
            token_ids = [*verified.generation.token_ids[start:], *inputs]
            segments.append(Segment(token_ids, start, verified.cache.block_table, len(inputs) + 1))
        logits = self._draft.run(segments)
        return probabilities(logits, [verified.sample_request(len(verified.draft_token_ids)) for verified in chains])

    def _catch_up(self, verified: _VerifiedChain) -> None:
        """Computes the sequence's tokens in chunks, until the rest fits into one step."""
        cache, token_ids = verified.cache, verified.generation.token_ids
        while len(token_ids) - cache.num_computed_tokens > self._limits.max_num_batched_tokens:
            start = cache.num_computed_tokens
            cache.num_computed_tokens += self._limits.max_num_batched_tokens
            chunk = token_ids[start : cache.num_computed_tokens]
            self._draft.run([Segment(chunk, start, cache.block_table, num_logits=0)])
