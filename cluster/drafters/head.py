"""A drafter with a head that is a decoder (EAGLE, MTP), which reads hidden states in the target's process.

Place t of a sequence in the head's cache is computed from the state of token t and the embedding of token t + 1. So the
contents of a block depend on the sequence's first token and on the tokens up to the end of the block, and prefixes are
shared as in `cluster.drafters.model`. Drafts are computed from the head's own states. When the target has verified
them, the places of the accepted drafts are computed again from the target's states.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from cluster.drafters.base import DraftSequence
from cluster.drafters.model import LevelStep, ModelDrafter
from cluster.drafters.read_tokens import ReadTokens
from cluster.drafters.target_states import ComputedSequence, TargetStates
from cluster.engine.batch import Batch, slots_of
from cluster.engine.heads import DecoderHead
from cluster.engine.limits import StepLimits
from cluster.engine.model import LayerInputs
from cluster.engine.runner import ModelRunner
from cluster.speculation.device_copy import copy_to


@dataclass(slots=True)
class _Sources:
    """Locations of the states that the rows of a step read."""

    of_target: list[int] = field(default_factory=list)  # rows that read the target's states
    target_slots: list[int] = field(default_factory=list)
    of_head: list[int] = field(default_factory=list)  # rows that read the head's states
    head_slots: list[int] = field(default_factory=list)


class HeadDrafter(ModelDrafter):
    """Drafts with a head that keeps its own states in its KV cache. Must run in the target's thread."""

    def __init__(self, head: DecoderHead, runner: ModelRunner, limits: StepLimits, target: TargetStates) -> None:
        super().__init__(runner, limits)
        self.vocab_size = target.runner.model.config.vocab_size
        self._head = head
        self._target = target
        self._computed: Mapping[DraftSequence, ComputedSequence] = {}
        self._sources = _Sources()

    def draft(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        self._computed, self._sources = self._target.of(sequences), _Sources()
        return super().draft(list(self._computed)) if self._computed else []

    def rewind(self, sequence: DraftSequence, kept: Sequence[int]) -> None:
        self._caches[sequence].computed_nodes.clear()
        if kept:
            sequence.drop_drafts()  # they were computed from the head's own states, not the target's

    def _read_tokens(self, sequence: DraftSequence, token_ids: Sequence[int], num_certain: int) -> Iterator[ReadTokens]:
        yield ReadTokens(token_ids, num_skipped=1)  # place t has token t + 1

    def _root(self, sequence: DraftSequence) -> bytes:
        return hashlib.sha256(sequence.cache_root + array("q", sequence.token_ids[:1]).tobytes()).digest()

    def _add(self, step: LevelStep, sequence: DraftSequence, most: int) -> None:
        first_row, num_segments = step.num_rows, len(step.segments)
        super()._add(step, sequence, most)
        if len(step.segments) == num_segments:
            return
        segment, sources, end = step.segments[-1], self._sources, sequence.num_committed - 1
        target_places, head_places = [], []
        for row, place in enumerate(segment.places(), start=first_row):
            if place < end:
                sources.of_target.append(row)
                target_places.append(place)
            else:
                sources.of_head.append(row)
                head_places.append(end + sequence.parents[place - end])
        computed = self._computed[sequence]
        sources.target_slots += slots_of(target_places, computed.block_table, self._target.runner.blocks.block_size)
        sources.head_slots += slots_of(head_places, segment.block_table, self.block_size)

    def _run(self, step: LevelStep) -> torch.Tensor:
        logits = self._runner.run(step.segments, inputs=self._inputs)
        return self._head.of_target_ids(logits, self.vocab_size)

    @torch.inference_mode()
    def _inputs(self, batch: Batch) -> LayerInputs:
        sources = self._sources
        of_target, target_slots, of_head, head_slots = copy_to(
            batch.token_ids.device,
            [sources.of_target, sources.target_slots, sources.of_head, sources.head_slots],
        )
        return self._head.inputs(
            batch.token_ids,
            of_target,
            self._target.runner.states[target_slots],
            of_head,
            self._runner.states[head_slots],
        )
