"""vLLM as a drafter in this process: each step adds one token to the selected requests."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.executor import Executor
from vllm.v1.request import Request

from cluster.config.workers import WorkerConfig
from cluster.engine.prompt_pace import PromptPace
from cluster.errors import ConfigurationError, first_line
from cluster.targets.base import TargetLoad
from cluster.vllm.core.scheduler import EngineStep, Rounds, RoundScheduler
from cluster.vllm.coupling import Coupling
from cluster.vllm.engine_args import common_engine_args, make_args, set_environment
from cluster.vllm.runner.sampling import EXTENSION


class DraftEngine:
    """An engine core that runs in the calling thread. With one rank, its model runs in this thread too.

    A request lives from `add` until `remove`, or until it has the model's maximum length.
    """

    def __init__(self, worker: WorkerConfig) -> None:
        """Loads the model. Raises ConfigurationError."""
        set_environment(worker)
        values = {**common_engine_args(worker), "worker_extension_cls": EXTENSION, "scheduler_cls": RoundScheduler}
        args = make_args(EngineArgs, values)
        try:
            with _settable_threads():
                config = args.create_engine_config()
                self._engine = LLMEngine(config, Executor.get_class(config), log_stats=False)
                self._engine.collective_rpc("install_coupled_sampling")
        except (ValueError, RuntimeError, OSError) as error:
            raise ConfigurationError(f"vLLM cannot run {worker.model!r}: {first_line(error)}") from error
        self._scheduler: RoundScheduler = self._engine.engine_core.engine_core.scheduler
        self._scheduler.rounds = self._named = _Named()
        self._scheduler.pace = PromptPace(worker.max_prefill_seconds, self._scheduler.max_num_scheduled_tokens)
        self._num_added = 0
        self._num_threads, self._thread = torch.get_num_threads(), threading.get_ident()
        self.max_model_len: int = config.model_config.max_model_len
        self.vocab_size: int = config.model_config.get_vocab_size()
        self.dtype = str(config.model_config.dtype).removeprefix("torch.")
        self.block_size: int = config.cache_config.block_size

    def load(self) -> TargetLoad:
        """Returns the engine's load. Thread-safe."""
        return self._scheduler.load()

    @property
    def prefix_cache(self) -> tuple[int, int]:
        """Number of tokens of all started requests, and the number of those found in the cache. Thread-safe."""
        return self._scheduler.num_queried_tokens, self._scheduler.num_hit_tokens

    def add(self, token_ids: Sequence[int], coupling: Coupling, cache_root: bytes = b"") -> str:
        """Adds a request that continues `token_ids`. Returns its ID.

        `token_ids` must be shorter than the model's maximum length. Requests with different `cache_root` share no KV.
        """
        params = SamplingParams(
            temperature=0.0,
            max_tokens=self.max_model_len - len(token_ids),
            ignore_eos=True,  # the target decides when an answer ends
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=coupling.to_extra_args(),
        )
        self._num_added += 1
        prompt = TokensPrompt(prompt_token_ids=list(token_ids))
        if cache_root:
            prompt["cache_salt"] = cache_root.hex()
        request_id: str = self._engine.add_request(str(self._num_added), prompt, params)
        return request_id

    def remove(self, request_id: str) -> None:
        """Frees the request's blocks, which stay in the prefix cache. Does nothing if the request has ended."""
        self._engine.abort_request([request_id], internal=True)

    def step(self, request_ids: Collection[str]) -> dict[str, int]:
        """Runs one step, which adds a token to each of `request_ids`. Returns the new tokens by request ID.

        Requests whose prompt does not fit in the step get no token yet. Other requests do not advance, unless their
        prompt is being computed.
        """
        if threading.get_ident() != self._thread:
            # OpenMP has a number of threads for each calling thread, so a new one needs it set again.
            self._thread = threading.get_ident()
            torch.set_num_threads(self._num_threads)
        self._named.request_ids, self._named.token_ids = frozenset(request_ids), {}
        self._engine.step()
        return self._named.token_ids


class _Named(Rounds):
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
