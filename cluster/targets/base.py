"""Interface of target engines, which verify drafts."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.constraints import UNCONSTRAINED, Constraints
from cluster.coordination.timeline import Timeline
from cluster.engine.limits import StepLimits
from cluster.engine.sequence import FinishReason
from cluster.errors import InvalidRequestError, NotFoundError, OutriderError
from cluster.grammars.matcher import CompiledGrammar
from cluster.logprobs import TokenLogprobs
from cluster.speculation.demand import DraftDemand
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.telemetry.metrics import Reading


def root_of(cache_salt: str | None) -> bytes:
    """Returns the root of the block hashes of requests with `cache_salt`: its SHA-256, or b"" without a salt.

    Requests with different roots do not share KV. The root does not reveal the salt.
    """
    return hashlib.sha256(cache_salt.encode()).digest() if cache_salt else b""


@dataclass(frozen=True, slots=True)
class TargetModel:
    """Description of the model that a target runs, for other components."""

    name: str
    dtype: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate."""

    request_id: str  # unique among running requests
    token_ids: list[int]  # the prompt, followed by tokens that another target generated
    num_prompt_tokens: int
    params: SamplingParams
    noise_key: NoiseKey
    max_tokens: int  # generated tokens in all
    ignore_eos: bool
    num_speculative_tokens: int | None  # None: the controller decides
    stop_token_ids: frozenset[int] = frozenset()  # tokens that end the sequence, even with `ignore_eos`
    constraints: Constraints = UNCONSTRAINED
    grammar: CompiledGrammar | None = None  # compiled from `constraints`
    num_logprobs: int | None = None  # likeliest tokens to report for each generated token; None: no log-probabilities
    num_prompt_logprobs: int | None = None  # the same for the prompt's tokens
    priority: int = 0  # of an owner's waiting requests the one with the lowest value goes first
    owner: bytes = b""  # who shares the target fairly with other owners; b"": unknown
    cache_salt: str = ""  # KV is shared only between requests with the same salt
    adapter: str = ""  # LoRA; "": none
    adapter_fingerprint: str = ""  # fingerprint of the adapter's contents; "": any contents
    conversation: bytes = b""  # the same for all turns of a conversation; b"": unknown
    output_limit: float | None = None  # limit of mean seconds per output token after the first; None: the target's
    is_traced: bool = False  # whether the target also publishes the admission
    arrived_at: float = field(default_factory=time.monotonic)

    @property
    def cache_root(self) -> bytes:
        """Root of the block hashes, which differs with the cache salt; b"" without a salt."""
        return root_of(self.cache_salt)

    def end_token_ids(self, model: TargetModel) -> frozenset[int]:
        """Returns the tokens that end the sequence. With a grammar, `ignore_eos` has no effect."""
        ignores_eos = self.ignore_eos and self.constraints.grammar is None
        return self.stop_token_ids | (frozenset() if ignores_eos else frozenset(model.eos_token_ids))


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """Output of one step for one request: the committed tokens; no tokens if it reports the request's admission."""

    request_id: str
    token_ids: Sequence[int]
    finish_reason: FinishReason | None
    num_draft_tokens: int
    num_accepted_tokens: int
    error: OutriderError | None = None  # set: the request has ended with this error
    admitted_at: int | None = None  # nanoseconds since the epoch; another output may report it after a preemption
    logprobs: TokenLogprobs | None = None  # log-probabilities of `token_ids`, if requested
    prompt_logprobs: TokenLogprobs | None = None  # those of the next prompt tokens, beginning with the second token
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache; only in the first output with tokens

    @classmethod
    def of_admission(cls, request_id: str) -> GenerationOutput:
        """Returns the output that reports the admission of `request_id`."""
        return cls(request_id, (), None, 0, 0, admitted_at=time.time_ns())

    @classmethod
    def of_prompt(cls, request_id: str, logprobs: TokenLogprobs) -> GenerationOutput:
        """Returns the output with `logprobs` of further prompt tokens."""
        return cls(request_id, (), None, 0, 0, prompt_logprobs=logprobs)


@dataclass(frozen=True, slots=True)
class TargetLoad:
    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_blocks: int
    num_draft_links: int = 0
    num_draft_endpoints: int = 0  # listed draft workers
    num_waiting_tokens: int = 0  # tokens of the waiting sequences
    demand: DraftDemand | None = None  # None: the gain of drafts is unknown


def load_readings(load: TargetLoad, num_deferred: int = 0) -> Iterator[Reading]:
    """Yields the readings of waiting sequences and KV blocks.

    `num_deferred`: waiting sequences that the last step passed over, for example because an adapter had no slot.
    """
    waiting = "Sequences that wait for KV blocks."
    yield Reading("vllm:num_requests_waiting", waiting, load.num_waiting)
    reasons = "Waiting sequences by reason: KV blocks are missing (capacity), or another limit applies (deferred)."
    for reason, number in (("capacity", load.num_waiting - num_deferred), ("deferred", num_deferred)):
        yield Reading("vllm:num_requests_waiting_by_reason", reasons, max(0, number), labels={"reason": reason})
    usage = load.num_used_blocks / load.num_blocks
    yield Reading("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, from 0 to 1.", usage)


Publish = Callable[[Sequence[GenerationOutput]], None]
"Receives the outputs of one step, or the admissions before it; called from the engine's thread, never blocks."


def no_adapter(name: str) -> str:
    return f"there is no adapter {name[:128]!r} on this target"


class Target(ABC):
    """A target engine with its coordinator."""

    model: TargetModel
    limits: StepLimits
    block_size: int  # tokens in a KV block
    caches_prefixes: bool  # whether the KV of a prompt is kept for later prompts with the same beginning
    error: BaseException | None = None  # the error that ended the step loop, if any

    @property
    @abstractmethod
    def is_stuck(self) -> bool:
        """True if the engine has work but makes no progress. Thread-safe."""

    @property
    def adapters(self) -> Mapping[str, str]:
        """Fingerprints of the LoRA adapters that requests can name, by name. Thread-safe."""
        return {}

    async def load_adapter(self, name: str, path: str, *, replace: bool) -> str:
        """Loads the adapter in the folder `path`, so that requests can use it as `name`. Returns its fingerprint.

        `replace`: may replace an adapter that has the same name and other contents. Running requests keep the old one.
        Raises InvalidRequestError, and changes nothing, if the adapter cannot be loaded.
        """
        raise InvalidRequestError("this target's engine has no adapters: they need target.engine vllm")

    async def unload_adapter(self, name: str) -> int:
        """Unloads the adapter for new requests. Returns the number of running requests, which keep the adapter.

        Raises NotFoundError if no adapter has this name.
        """
        raise NotFoundError(no_adapter(name))

    @abstractmethod
    def start(self, publish: Publish) -> None:
        """Starts the step loop in its own thread."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the step loop after the step that is running."""

    @abstractmethod
    async def run_links(self, endpoints: AsyncIterator[Sequence[str]]) -> None:
        """Keeps the links to the draft workers at `endpoints` up until cancelled."""

    @abstractmethod
    def submit(self, request: GenerationRequest) -> None:
        """Adds `request`. Thread-safe.

        Raises InvalidRequestError if the request can never run, and NotFoundError if its adapter is not loaded. In both
        cases nothing changes.
        """

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Ends the request within a step, without further outputs. Ignores unknown requests. Thread-safe."""

    @abstractmethod
    def load(self) -> TargetLoad: ...

    @property
    def timeline(self) -> Timeline | None:
        """Last steps and answers of the drafters. None if the engine does not report single steps. Thread-safe."""
        return None

    @abstractmethod
    def readings(self) -> Iterable[Reading]:
        """Returns the worker's current metrics. Thread-safe."""
