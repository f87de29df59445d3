"""A drafter with a vLLM engine, for models that only vLLM runs. It samples chains under the target's noise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.drafters.base import Drafter, DraftSequence
from cluster.speculation.params import SamplingParams
from cluster.telemetry.metrics import Reading
from cluster.vllm.coupling import Coupling
from cluster.vllm.drafter.engine import DraftEngine
from cluster.vocabulary_map import VocabularyMap


@dataclass(slots=True)
class _Request:
    """The engine's request for a sequence. It continues while the target accepts all of its tokens."""

    id: str
    params: SamplingParams
    num_tokens: int
    num_drafts: int  # tokens at the end that are drafts


class VllmDrafter(Drafter):
    """Extends the main paths of all sequences that request it, one engine step at a time.

    If the target chose other tokens, or more tokens than were drafted, the drafter removes the engine's request and
    starts a new one in the next step. The prefix cache limits the recomputation to the new tokens and at most one
    block. The drafter reserves blocks when a sequence is admitted and as it grows, so that the engine never has to
    preempt a request. `draft` returns the sequences that cannot grow.
    """

    def __init__(self, engine: DraftEngine, max_num_seqs: int, vocabulary: VocabularyMap | None = None) -> None:
        """`vocabulary`: if not None, every token of the target has the same ID in the engine's model."""
        assert vocabulary is None or vocabulary.keeps_ids
        self.max_model_len = engine.max_model_len
        self.vocab_size = engine.vocab_size
        self.vocabulary = vocabulary
        self.dtype = engine.dtype
        self.num_blocks = engine.load().num_blocks
        self.block_size = engine.block_size
        self._engine = engine
        self._max_num_seqs = max_num_seqs
        self._reserved: dict[DraftSequence, int] = {}  # blocks
        self._requests: dict[DraftSequence, _Request] = {}

    @property
    def num_used_blocks(self) -> int:
        return self._engine.load().num_used_blocks

    @property
    def free_tokens(self) -> int:
        if len(self._reserved) >= self._max_num_seqs:
            return 0
        return self._num_free_blocks * self.block_size

    def readings(self) -> Iterable[Reading]:
        yield from super().readings()
        num_queried, num_hits = self._engine.prefix_cache
        yield Reading("vllm:prefix_cache_queries", "Tokens of started sequences.", num_queried, is_counter=True)
        hits = "Tokens of started sequences whose KV was in the prefix cache."
        yield Reading("vllm:prefix_cache_hits", hits, num_hits, is_counter=True)

    def admit(self, sequence: DraftSequence) -> bool:
        if len(self._reserved) >= self._max_num_seqs or len(sequence.token_ids) >= self.max_model_len:
            return False
        return self._reserve(sequence, min(len(sequence.token_ids) + sequence.window, self.max_model_len))

    def draft(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        taking_part: dict[str, DraftSequence] = {}
        without_room: list[DraftSequence] = []
        for sequence in sequences:
            if self._reserve(sequence, len(sequence.token_ids)):
                taking_part[self._request_of(sequence).id] = sequence
            else:
                without_room.append(sequence)
        if taking_part:
            self._step(taking_part)
        return without_room

    def rewind(self, sequence: DraftSequence, kept: Sequence[int]) -> None:
        request = self._requests.get(sequence)
        if request is None:
            return
        if len(kept) == request.num_drafts and len(sequence.token_ids) == request.num_tokens:
            request.num_drafts = len(sequence.parents)
        else:
            self._remove_request(sequence)

    def release(self, sequence: DraftSequence) -> None:
        self._remove_request(sequence)
        del self._reserved[sequence]

    def _step(self, taking_part: dict[str, DraftSequence]) -> None:
        by_id = {request.id: sequence for sequence, request in self._requests.items()}
        for request_id, token_id in self._engine.step(taking_part.keys()).items():
            # May include a sequence that this step did not request, if its prompt was still being computed.
            sequence = by_id[request_id]
            if self.vocabulary is not None and not self.vocabulary.has(token_id):
                sequence.is_exhausted = True  # the target lacks the token
                self._remove_request(sequence)
                continue
            sequence.append(token_id)
            request = self._requests[sequence]
            request.num_tokens += 1
            request.num_drafts += 1

    def _request_of(self, sequence: DraftSequence) -> _Request:
        """Returns the engine's request for `sequence`. Starts a request if there is none."""
        request = self._requests.get(sequence)
        if request is not None and request.params != sequence.params:
            self._remove_request(sequence)  # the sequence is now drafted at another temperature
            request = None
        if request is None:
            coupling = Coupling(sequence.params, sequence.noise_key, sequence.num_prompt_tokens)
            request_id = self._engine.add(sequence.token_ids, coupling, sequence.cache_root)
            request = _Request(request_id, sequence.params, len(sequence.token_ids), len(sequence.parents))
            self._requests[sequence] = request
        return request

    def _remove_request(self, sequence: DraftSequence) -> None:
        request = self._requests.pop(sequence, None)
        if request is not None:
            self._engine.remove(request.id)

    @property
    def _num_free_blocks(self) -> int:
        return self.num_blocks - sum(self._reserved.values())

    def _reserve(self, sequence: DraftSequence, num_tokens: int) -> bool:
        """Reserves blocks for `num_tokens` tokens of `sequence`; never reduces the reservation.

        Returns False if too few blocks are free.
        """
        num_had = self._reserved.get(sequence, 0)
        num_needed = max(num_had, -(-num_tokens // self.block_size))
        if num_needed - num_had > self._num_free_blocks:
            return False
        self._reserved[sequence] = num_needed
        return True
