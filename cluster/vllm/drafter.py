"""A drafter with a vLLM engine, for models that only vLLM runs. It samples chains under the target's noise."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from vllm import EngineArgs, LLMEngine
from vllm import SamplingParams as VllmSamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.executor import Executor
from vllm.v1.request import Request

from cluster.config.workers import DraftConfig
from cluster.drafters.base import Drafter, DraftSequence
from cluster.engine.prompt_pace import PromptPace
from cluster.errors import ConfigurationError, first_line
from cluster.speculation.params import SamplingParams
from cluster.telemetry.metrics import Reading
from cluster.vllm.core.scheduler import EngineStep, Rounds, RoundScheduler
from cluster.vllm.coupling import Coupling
from cluster.vllm.engine_args import common_engine_args, make_args
from cluster.vllm.runner.sampling import EXTENSION
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

    The engine core runs in the calling thread. With one rank, its model runs in this thread too.

    If the target chose other tokens, or more tokens than were drafted, the drafter removes the engine's request and
    starts a new one in the next step. The prefix cache limits the recomputation to the new tokens and at most one
    block. The drafter reserves blocks when a sequence is admitted and as it grows, so that the engine never has to
    preempt a request. `draft` returns the sequences that cannot grow.
    """

    def __init__(self, draft: DraftConfig, vocabulary: VocabularyMap | None = None) -> None:
        """Loads the model. Raises ConfigurationError. `set_environment` must be called before.

        `vocabulary`: if not None, every token of the target has the same ID in the engine's model.
        """
        assert vocabulary is None or vocabulary.keeps_ids
        values = {**common_engine_args(draft), "worker_extension_cls": EXTENSION, "scheduler_cls": RoundScheduler}
        args = make_args(EngineArgs, values)
        try:
            with _settable_threads():
                config = args.create_engine_config()
                self._engine = LLMEngine(config, Executor.get_class(config), log_stats=False)
                self._engine.collective_rpc("install_coupled_sampling")
        except (ValueError, RuntimeError, OSError) as error:
            raise ConfigurationError(f"vLLM cannot run {draft.model!r}: {first_line(error)}") from error
        self._num_threads, self._thread = torch.get_num_threads(), threading.get_ident()
        self._scheduler: RoundScheduler = self._engine.engine_core.engine_core.scheduler
        self._scheduler.rounds = self._step_rounds = _StepRounds()
        self._scheduler.pace = PromptPace(draft.max_prefill_seconds, self._scheduler.max_num_scheduled_tokens)
        self.max_model_len = config.model_config.max_model_len
        self.vocab_size = config.model_config.get_vocab_size()
        self.vocabulary = vocabulary
        self.dtype = str(config.model_config.dtype).removeprefix("torch.")
        self.num_blocks = self._scheduler.load().num_blocks
        self.block_size = config.cache_config.block_size
        self._max_num_seqs = draft.max_num_seqs
        self._num_requests = 0  # added to the engine
        self._reserved: dict[DraftSequence, int] = {}  # blocks
        self._requests: dict[DraftSequence, _Request] = {}

    @property
    def num_used_blocks(self) -> int:
        return self._scheduler.load().num_used_blocks

    @property
    def free_tokens(self) -> int:
        if len(self._reserved) >= self._max_num_seqs:
            return 0
        return self._num_free_blocks * self.block_size

    def readings(self) -> Iterable[Reading]:
        yield from super().readings()
        queried, num_queried = "Tokens of started sequences.", self._scheduler.num_queried_tokens
        yield Reading("vllm:prefix_cache_queries", queried, num_queried, is_counter=True)
        hits = "Tokens of started sequences whose KV was in the prefix cache."
        yield Reading("vllm:prefix_cache_hits", hits, self._scheduler.num_hit_tokens, is_counter=True)

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
        """Runs one step, which adds a token to each sequence of `taking_part` if its prompt fits in the step."""
        if threading.get_ident() != self._thread:
            # OpenMP has a number of threads for each calling thread, so a new one needs it set again.
            self._thread = threading.get_ident()
            torch.set_num_threads(self._num_threads)
        rounds = self._step_rounds
        rounds.request_ids, rounds.token_ids = frozenset(taking_part), {}
        self._engine.step()
        by_id = {request.id: sequence for sequence, request in self._requests.items()}
        for request_id, token_id in rounds.token_ids.items():
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
            request_id = self._add_request(sequence)
            request = _Request(request_id, sequence.params, len(sequence.token_ids), len(sequence.parents))
            self._requests[sequence] = request
        return request

    def _add_request(self, sequence: DraftSequence) -> str:
        """Adds a request that continues `sequence` to the engine. Returns its ID."""
        params = VllmSamplingParams(
            temperature=0.0,
            max_tokens=self.max_model_len - len(sequence.token_ids),
            ignore_eos=True,  # the target decides when an answer ends
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=Coupling(sequence.params, sequence.noise_key, sequence.num_prompt_tokens).to_extra_args(),
        )
        prompt = TokensPrompt(prompt_token_ids=list(sequence.token_ids))
        if sequence.cache_root:
            prompt["cache_salt"] = sequence.cache_root.hex()
        self._num_requests += 1
        request_id: str = self._engine.add_request(str(self._num_requests), prompt, params)
        return request_id

    def _remove_request(self, sequence: DraftSequence) -> None:
        """Frees the blocks of the engine's request, which stay in the prefix cache."""
        request = self._requests.pop(sequence, None)
        if request is not None:  # the engine ignores a request that has ended
            self._engine.abort_request([request.id], internal=True)

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


class _StepRounds(Rounds):
    """Rounds without drafts. They select the requests of a step, and store its tokens."""

    def __init__(self) -> None:
        self.request_ids: frozenset[str] = frozenset()
        self.token_ids: dict[str, int] = {}

    def collect(self, decoding: Sequence[Request]) -> Mapping[str, Sequence[int]]:
        return {request.request_id: () for request in decoding if request.request_id in self.request_ids}

    def end(self, step: EngineStep) -> None:
        self.token_ids = {committed.request.request_id: committed.token_ids[0] for committed in step.rounds}


@contextmanager
def _settable_threads() -> Iterator[None]:
    """Restores `torch.set_num_threads` on exit.

    vLLM's CPU worker disables this function for the whole process.
    """
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.__dict__["set_num_threads"] = set_num_threads
