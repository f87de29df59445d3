"""Connects the coordinator to vLLM's scheduler, with the same calls in each step as our own step loop.

No exception may reach the engine. A failure ends the rounds: the engine continues without drafts, and a metric counts
the exception. After a pause the rounds restart with new links.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from vllm.v1.request import Request

from cluster.config.speculation import SpeculationConfig
from cluster.coordination.coordinator import Coordinator, StepTiming
from cluster.coordination.pool import DraftPool
from cluster.coordination.sequence import Round, SpeculativeSequence
from cluster.coordination.timeline import Timeline
from cluster.engine.limits import StepLimits
from cluster.placement.endpoints import follow
from cluster.speculation.demand import DraftDemand
from cluster.speculation.drafts import Drafts
from cluster.targets.base import root_of
from cluster.telemetry.metrics import Reading
from cluster.vllm.core.owners_queue import owner_of
from cluster.vllm.core.scheduler import EngineStep, Rounds
from cluster.vllm.coupling import Coupling

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = (1.0, 5.0, 20.0, 60.0)  # pause after a failure, before the rounds restart

_FORGIVEN_SECONDS = 600.0

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _contained(
    method: Callable[Concatenate[CoordinatedRounds, _P], _T],
) -> Callable[Concatenate[CoordinatedRounds, _P], _T | None]:
    """Wraps `method`: an exception ends the rounds. Returns None after an exception, and while the rounds are off."""

    @functools.wraps(method)
    def call(rounds: CoordinatedRounds, /, *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        try:
            if not rounds.is_on:
                return None
            return method(rounds, *args, **kwargs)
        except Exception as error:
            rounds.fail(error)
            return None

    return call


class CoordinatedRounds(Rounds):
    """Rounds with a coordinator; for the engine core's thread unless noted."""

    def __init__(
        self,
        links: Links,
        config: SpeculationConfig,
        vocab_size: int,
        limits: StepLimits,
        step_times: Sequence[tuple[int, float]] = (),
        clock: Callable[[], float] = time.monotonic,
        *,
        reserves_rows: bool = False,
    ) -> None:
        """`step_times`: pairs of rows and seconds, from steps before the first request.

        `reserves_rows`: whether the number of rows of a step is fixed before its drafts are collected.
        """
        self._links = links
        self._config = config
        self._vocab_size = vocab_size
        self._limits = limits
        self._reserves_rows = reserves_rows
        self._clock = clock
        self._sequences: dict[str, SpeculativeSequence] = {}
        self._failures: Counter[str] = Counter()
        self._failed_at: list[float] = []  # times of recent failures
        self._begin_anew_at: float | None = None
        self._step_times = step_times
        self._coordinator = self._new_coordinator()

    @property
    def is_on(self) -> bool:
        """True if rounds are on. Restarts them if the pause after a failure is over."""
        if self._begin_anew_at is None:
            return True
        if self._clock() < self._begin_anew_at:
            return False
        logger.info("speculation restarts")
        self._begin_anew_at = None
        self._coordinator = self._new_coordinator()
        return True

    @property
    def spare_seconds(self) -> float:
        return self._coordinator.planner.spare_seconds if self._begin_anew_at is None else math.inf

    def fail(self, error: Exception) -> None:
        """Ends the rounds after `error`, for a pause that grows with the number of recent failures."""
        now = self._clock()
        self._failed_at = [at for at in self._failed_at if at > now - _FORGIVEN_SECONDS]
        pause = _PAUSE_SECONDS[min(len(self._failed_at), len(_PAUSE_SECONDS) - 1)]
        self._failed_at.append(now)
        self._failures[type(error).__name__] += 1
        self._begin_anew_at = now + pause
        self._sequences.clear()
        self._links.reset()  # the drafters release their sequences
        logger.error("speculation is off for %.0f s: its coordinator failed", pause, exc_info=error)

    @_contained
    def plan(self, decoding: Sequence[Request], joining: Sequence[Request]) -> Mapping[str, int]:
        found = self._found(decoding)
        self._coordinator.plan(list(found.values()), self._known(joining))
        if not self._reserves_rows:
            return {}  # the number of rows follows from the drafts
        num_rows = self._coordinator.reserve(list(found.values()))
        return {request_id: num_rows[sequence] for request_id, sequence in found.items()}

    @_contained
    def collect(self, decoding: Sequence[Request]) -> Mapping[str, Sequence[int]]:
        found = self._found(decoding)
        drafts = self._coordinator.collect(list(found.values()))
        collected: dict[str, Sequence[int]] = {request.request_id: () for request in decoding}
        return collected | {request_id: drafts[sequence].token_ids for request_id, sequence in found.items()}

    @_contained
    def scheduled(self, joining: Sequence[Request]) -> None:
        new = [request for request in joining if request.request_id not in self._sequences]
        if new:
            self._coordinator.end((), None, self._known(new))

    @_contained
    def end(self, step: EngineStep) -> None:
        rounds = []
        for committed in step.rounds:
            sequence = self._sequences.get(committed.request.request_id)
            if sequence is not None and committed.finish_reason is None:
                drafts = committed.draft_token_ids  # without tokens that only fill the rows of the step
                rounds.append(Round(sequence, Drafts(drafts), committed.token_ids[: len(drafts) + 1]))
        self._coordinator.end(rounds, _timing(step) if step.rounds or step.prompts else None)

    @_contained
    def close(self, request: Request) -> None:
        sequence = self._sequences.pop(request.request_id, None)
        if sequence is not None:
            self._coordinator.close(sequence)

    @property
    def timeline(self) -> Timeline:
        """Timeline of the current coordinator; replaced when speculation restarts. Thread-safe."""
        return self._coordinator.timeline

    def demand(self) -> DraftDemand | None:
        """Returns the coordinator's demand for drafts. Thread-safe."""
        return self._coordinator.demand()

    def readings(self) -> Iterator[Reading]:
        """Returns the metrics of the rounds. Thread-safe."""
        yield from self._coordinator.readings()
        failed = "Times that the coordinator failed and speculation was off for a while, by exception."
        for name, count in dict(self._failures).items():
            yield Reading("outrider_coordinator_failures", failed, count, is_counter=True, labels={"exception": name})

    def _new_coordinator(self) -> Coordinator:
        coordinator = Coordinator(self._links.pool, self._config, self._vocab_size, self._limits, self._clock)
        coordinator.observe_step_times(self._step_times)
        return coordinator

    def _known(self, requests: Sequence[Request]) -> list[SpeculativeSequence]:
        return list(self._found(requests).values())

    def _found(self, requests: Sequence[Request]) -> dict[str, SpeculativeSequence]:
        """Returns the sequences of `requests` by request ID; omits requests without sampling parameters."""
        found = {request.request_id: self._sequence(request) for request in requests}
        return {request_id: sequence for request_id, sequence in found.items() if sequence is not None}

    def _sequence(self, request: Request) -> SpeculativeSequence | None:
        """Returns the sequence of `request`; None if the request has no sampling parameters."""
        sequence = self._sequences.get(request.request_id)
        if sequence is None:
            coupling = Coupling.of(request.sampling_params)
            if coupling is None:
                return None
            sequence = self._sequences[request.request_id] = SpeculativeSequence(
                request.all_token_ids,
                coupling.num_prompt_tokens,
                coupling.params,
                coupling.noise_key,
                coupling.num_speculative_tokens,
                min(request.num_prompt_tokens + request.max_tokens, self._limits.max_model_len),
                root_of(request.cache_salt),
                coupling.conversation,
                coupling.output_limit,
                owner_of(request),
            )
        return sequence


def _timing(step: EngineStep) -> StepTiming:
    return StepTiming(
        step.num_rows,
        step.seconds,
        is_pure=not step.prompts,
        num_prompts=len(step.prompts),
        num_prompt_tokens=sum(prompt.num_tokens for prompt in step.prompts),
        left_prompts=step.left_prompts,
        longest_context=max((prompt.num_before for prompt in step.prompts), default=0),
    )


class Links:
    """Runs the links of a draft pool in a thread with its own event loop."""

    def __init__(self, new_pool: Callable[[], DraftPool], addresses: Sequence[str] = ()) -> None:
        """`addresses`: addresses of the draft workers, watched for changes; if empty, `follow` sets them."""
        self._new_pool = new_pool
        self.pool = new_pool()
        self._addresses = addresses
        self._endpoints: Sequence[str] = ()
        self._changed: asyncio.Event
        self._loop = asyncio.new_event_loop()
        self._running: asyncio.Task[None] | None = None
        threading.Thread(target=self._loop.run_forever, name="draft-links", daemon=True).start()
        self._loop.call_soon_threadsafe(self._run)

    # Any thread.

    def follow(self, endpoints: Sequence[str]) -> None:
        """Replaces the draft workers by those at `endpoints`."""
        self._loop.call_soon_threadsafe(self._set, endpoints)

    def reset(self) -> None:
        """Ends all links, and starts a new pool."""
        self.pool = self._new_pool()
        self._loop.call_soon_threadsafe(self._run)

    # The loop's thread.

    def _set(self, endpoints: Sequence[str]) -> None:
        self._endpoints = endpoints
        self._changed.set()

    def _run(self) -> None:
        if self._running is not None:
            self._running.cancel()
        self._changed = asyncio.Event()
        lists = follow(self._addresses) if self._addresses else self._lists(self._changed)
        self._running = self._loop.create_task(self.pool.run(lists))

    async def _lists(self, changed: asyncio.Event) -> AsyncIterator[Sequence[str]]:
        while True:
            yield self._endpoints
            await changed.wait()
            changed.clear()
