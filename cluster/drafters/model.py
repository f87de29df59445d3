"""A small model as the drafter: it proposes what it would choose itself under the target's noise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from cluster.drafters.base import Drafter, DraftSequence
from cluster.engine.batch import Segment
from cluster.engine.runner import ModelRunner
from cluster.speculation.sampling import SampleRequest, sample
from cluster.telemetry.metrics import Reading


@dataclass(slots=True)
class _Cache:
    """What the KV cache holds of one sequence."""

    block_table: list[int]
    num_computed_tokens: int


class ModelDrafter(Drafter):
    """Drafts with a model of the PyTorch engine.

    Blocks for a sequence's tokens and window are taken when it is admitted, more as it grows; one that cannot grow
    is given up.
    """

    def __init__(self, runner: ModelRunner, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = runner.model.config.vocab_size
        self.dtype = str(runner.model.dtype).removeprefix("torch.")
        self.num_blocks = runner.blocks.num_blocks
        self._runner = runner
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._caches: dict[DraftSequence, _Cache] = {}

    @property
    def num_used_blocks(self) -> int:
        return self._runner.blocks.num_used_blocks

    def readings(self) -> Iterable[Reading]:
        return self._runner.blocks.readings()

    def admit(self, sequence: DraftSequence) -> bool:
        if len(self._caches) >= self._max_num_seqs or len(sequence.token_ids) >= self.max_model_len:
            return False
        num_tokens = min(len(sequence.token_ids) + sequence.window, self.max_model_len)
        allocated = self._runner.blocks.allocate_for(sequence.token_ids, num_tokens)
        if allocated is None:
            return False
        self._caches[sequence] = _Cache(*allocated)
        return True

    def draft(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        segments: list[Segment] = []
        completed: list[DraftSequence] = []
        without_room: list[DraftSequence] = []
        budget, blocks = self._max_num_batched_tokens, self._runner.blocks
        for sequence in sequences:
            cache = self._caches[sequence]
            if not blocks.grow(cache.block_table, len(sequence.token_ids)):
                without_room.append(sequence)
                continue
            start = cache.num_computed_tokens
            blocks.cache(cache.block_table, sequence.token_ids, min(start, sequence.num_committed))
            end = min(len(sequence.token_ids), start + budget)
            if start == end:
                break
            is_complete = end == len(sequence.token_ids)
            segments.append(
                Segment(sequence.token_ids[start:end], start, cache.block_table, num_logits=int(is_complete))
            )
            if is_complete:
                completed.append(sequence)
            cache.num_computed_tokens = end
            budget -= end - start
        if segments:
            logits = self._runner.run(segments)
            for sequence, choice in zip(completed, self._choose(logits, completed), strict=True):
                sequence.token_ids.append(choice)
        return without_room

    @staticmethod
    def _choose(logits: torch.Tensor, sequences: Sequence[DraftSequence]) -> list[int]:
        if not sequences:
            return []
        return sample(
            logits,
            [SampleRequest(s.params, s.noise_key, s.token_ids, s.num_prompt_tokens) for s in sequences],
        )

    def rewind(self, sequence: DraftSequence, num_tokens: int) -> None:
        cache = self._caches[sequence]
        cache.num_computed_tokens = min(cache.num_computed_tokens, num_tokens)

    def release(self, sequence: DraftSequence) -> None:
        self._runner.blocks.free(self._caches.pop(sequence).block_table)
