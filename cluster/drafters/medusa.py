"""A drafter with Medusa heads, which reads one hidden state of each sequence in the target's process.

One step drafts all tokens of a proposal. Each draft is the best token under the noise of its position, as in
`cluster.drafters.model`, but it does not depend on the drafts before it. The typical acceptance of the paper is left
out, because it changes the distribution of the answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.drafters.base import Drafter, DraftSequence
from cluster.drafters.levels import extend_by_levels
from cluster.drafters.target_states import TargetStates
from cluster.engine.batch import slots_of
from cluster.engine.limits import StepLimits
from cluster.engine.medusa import MedusaHeads
from cluster.speculation.sampling import Sampler, SampleRequest
from cluster.speculation.token_counts import TokenCounts


class MedusaDrafter(Drafter):
    """Drafts with heads that have no KV cache. Must run in the target's thread.

    A proposal is at most as deep as the number of heads. It cannot be extended, because only committed tokens have
    states.
    """

    num_blocks = num_used_blocks = block_size = 0
    is_one_pass = True

    def __init__(self, heads: MedusaHeads, limits: StepLimits, target: TargetStates) -> None:
        model = target.runner.model
        self.max_model_len = limits.max_model_len
        self.vocab_size = model.config.vocab_size
        self.dtype = str(model.dtype).removeprefix("torch.")
        self._heads = heads
        self._limits = limits
        self._target = target
        self._device = model.device
        self._sampler = Sampler(model.device)
        self._counts: dict[DraftSequence, TokenCounts | None] = {}  # None: the sequence has had no penalties

    @property
    def free_tokens(self) -> int | None:
        return 0 if len(self._counts) >= self._limits.max_num_seqs else None

    def admit(self, sequence: DraftSequence) -> bool:
        if len(self._counts) >= self._limits.max_num_seqs or len(sequence.token_ids) >= self.max_model_len:
            return False
        self._counts[sequence] = None
        return True

    def draft(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        found = self._target.of(sequences)
        if not found:
            return []
        blocks, slots, counts = self._target.runner.blocks, [], []
        for sequence, computed in found.items():
            slots += slots_of([sequence.num_committed - 2], computed.block_table, blocks.block_size)
            counts.append(min(len(self._heads.heads), sequence.num_drafts_after(-1, self.max_model_len)))
        logits = self._heads.logits(self._target.runner.states[slots], counts)
        requests = [self._request(sequence, number) for sequence, number in zip(found, counts, strict=True)]
        best = iter(self._sampler.best_choices(logits, requests, max(sequence.width for sequence in found)))
        for sequence, number in zip(found, counts, strict=True):
            extend_by_levels(sequence, -1, [next(best) for _ in range(number)], self.max_model_len)
            sequence.is_exhausted = bool(sequence.missing(self.max_model_len))  # k exceeds the number of heads
        return []

    def _request(self, sequence: DraftSequence, num_drafts: int) -> SampleRequest:
        params, counts = sequence.params, None
        if params.has_penalty:
            counts = self._counts[sequence] = self._counts[sequence] or TokenCounts(self.vocab_size, self._device)
            counts.count(sequence.token_ids, sequence.num_committed, sequence.num_prompt_tokens)
        # The drafts before a draft are not known yet. Penalties do not count IDs outside the vocabulary.
        unknown = [self.vocab_size] * (num_drafts - 1)
        token_ids, num_prompt_tokens = sequence.token_ids, sequence.num_prompt_tokens
        return SampleRequest(
            params, sequence.noise_key, token_ids, num_prompt_tokens, num_drafts, unknown, counts=counts
        )

    def num_rows(self, sequence: DraftSequence, node: int) -> int:
        return 1

    def rewind(self, sequence: DraftSequence, kept: Sequence[int]) -> None:
        if kept:
            sequence.drop_drafts()  # they were drafted from an older state

    def release(self, sequence: DraftSequence) -> None:
        del self._counts[sequence]
