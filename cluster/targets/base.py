"""Who verifies: the interface of every target engine."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from cluster.engine.limits import StepLimits
from cluster.engine.sequence import FinishReason
from cluster.errors import OutriderError
from cluster.speculation.demand import DraftDemand
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.telemetry.metrics import Reading


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate."""

    request_id: str  # unique among those that are running
    token_ids: list[int]  # the prompt, then what was generated elsewhere
    num_prompt_tokens: int
    params: SamplingParams
    noise_key: NoiseKey
    max_tokens: int  # generated tokens in all
    ignore_eos: bool
    num_speculative_tokens: int | None  # None: the controller decides
    is_traced: bool = False  # its admission is published too
    arrived_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """What one step committed for one request; or, without tokens, that it was admitted."""

    request_id: str
    token_ids: Sequence[int]
    finish_reason: FinishReason | None
    num_draft_tokens: int
    num_accepted_tokens: int
    error: OutriderError | None = None  # the request has ended with it
    admitted_at: int | None = None  # nanoseconds since the epoch; may come again after a preemption

    @classmethod
    def of_admission(cls, request_id: str) -> GenerationOutput:
        """`request_id` has been admitted just now."""
        return cls(request_id, (), None, 0, 0, admitted_at=time.time_ns())


@dataclass(frozen=True, slots=True)
class TargetLoad:
    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_blocks: int
    num_draft_links: int
    num_draft_endpoints: int = 0  # draft workers that are listed now
    num_waiting_tokens: int = 0  # of the sequences that wait
    demand: DraftDemand | None = None  # None: nothing is known of what drafts give


@dataclass(frozen=True, slots=True)
class TargetModel:
    """What others need to know of the model that a target runs."""

    name: str
    dtype: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


Publish = Callable[[Sequence[GenerationOutput]], None]
"""Takes the outputs of one step, or the admissions before it; called from the engine's thread, never blocks."""


class Target(ABC):
    """A target engine with its coordinator."""

    model: TargetModel
    limits: StepLimits
    block_size: int  # tokens in a KV block
    error: BaseException | None = None  # why the step loop ended, when it did

    @property
    @abstractmethod
    def is_stuck(self) -> bool:
        """Whether the engine has work and stands still. Any thread."""

    @abstractmethod
    def start(self, publish: Publish) -> None:
        """Starts the step loop in a thread of its own."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the step loop after the step that is running."""

    @abstractmethod
    async def run_links(self, endpoints: AsyncIterator[Sequence[str]]) -> None:
        """Keeps the links to the draft workers at `endpoints` up until cancelled."""

    @abstractmethod
    def submit(self, request: GenerationRequest) -> None:
        """Any thread. Raises InvalidRequestError, changing nothing, when the request can never run."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Any thread. Frees the request within a step; nothing more is published for it. Unknown: ignored."""

    @abstractmethod
    def load(self) -> TargetLoad: ...

    @abstractmethod
    def readings(self) -> Iterable[Reading]:
        """The worker's metrics as they are now; any thread."""
