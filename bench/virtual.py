"""A simulated target and its draft workers in virtual time: scheduler, rounds and draft workers are the real ones.

Nothing sleeps and nothing goes over a network: a minute of a cluster takes a few seconds, and every run is the same.
The target owns the clock. Each draft worker has one of its own, which is behind: what it does until the target's time
is worked out when the target looks for replies. A message is half a round trip on its way, so all that a worker can
have received by then is known.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from bench.in_process import simulated_request
from cluster.config import Config
from cluster.config_simulation import SimulationConfig
from cluster.coordination.base import LinkEvent, LinkPool, LinkState
from cluster.coordination.link import DraftLink
from cluster.drafters.simulated import SimulatedDrafter
from cluster.drafting.worker import DraftWorker
from cluster.engine.blocks import BlockManager
from cluster.engine.limits import StepLimits
from cluster.targets.base import GenerationOutput
from cluster.targets.simulated import SimulatedTarget
from cluster.telemetry.metrics import Reading
from cluster.wire.messages import SpeculateReply, SpeculateRequest

_VOCAB_SIZE = 1000
HAND_OVER_SECONDS = 0.0003  # of a message between two processes of one machine, in one direction
_NUM_BLOCKS = 1_000_000


@dataclass(slots=True)
class VirtualTime:
    """A `Timekeeper`."""

    seconds: float = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep_until(self, deadline: float) -> None:
        self.seconds = max(self.seconds, deadline)


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft worker that is wanted."""

    simulation: SimulationConfig
    name: str = "simulated"  # of its model
    round_trip_seconds: float = 0.0
    expected_round_trip: float | None = None  # by labels
    make_drafter: Callable[..., SimulatedDrafter] = SimulatedDrafter


class VirtualDraft:
    """A draft worker, and the coordinator's link to it."""

    def __init__(self, index: int, draft: Draft, config: Config, pool: VirtualPool) -> None:
        self.address = f"draft-{index}"
        self.model = draft.name
        self.expected_round_trip = draft.expected_round_trip
        self.is_up = False
        self.way_seconds = draft.round_trip_seconds / 2 + HAND_OVER_SECONDS
        self._pool = pool
        self._time = VirtualTime()
        self._limits = StepLimits.of(config.draft, config.target.max_model_len or 100_000)
        self._draft = draft
        self._branches = config.speculation.num_run_ahead_branches
        self._inbox: deque[tuple[float, SpeculateRequest]] = deque()
        self._sent_at: list[float] = []
        self._new_worker()

    def _new_worker(self) -> None:
        drafter = self._draft.make_drafter(self._draft.simulation, _VOCAB_SIZE, self._limits, self._time)
        self.worker = DraftWorker(drafter, self._branches, clock=self._time.now)
        self._number = self.worker.attach(self._deliver)

    def start(self) -> None:
        self._time.sleep_until(self._pool.time.now())
        self.is_up = True
        self._pool.happens(self, LinkState.UP, self._pool.time.now())

    def kill(self) -> None:
        """With all that it knows; `start` begins anew."""
        self.is_up = False
        self._inbox.clear()
        self._pool.happens(self, LinkState.DOWN, self._pool.time.now())
        self._new_worker()

    # A DraftLink's face.

    def send(self, request: SpeculateRequest) -> None:
        now = self._pool.time.now()
        self._sent_at.append(now)
        if self.is_up:
            self._inbox.append((now + self.way_seconds, request))

    @property
    def due_at(self) -> float:
        """When it has something to do."""
        if not self.is_up:
            return math.inf
        idle = self.worker.idle_seconds
        next_step = math.inf if idle is None else self._time.now() + idle
        if self._inbox:
            next_step = min(next_step, max(self._time.now(), self._inbox[0][0]))
        return next_step

    def step(self) -> None:
        due_at = self.due_at
        while self._inbox and self._inbox[0][0] <= due_at:
            self._time.seconds, request = self._inbox.popleft()  # the worker notes when it came
            self.worker.receive(self._number, request)
        self._time.seconds = due_at
        self.worker.step()

    def _deliver(self, reply: SpeculateReply) -> None:
        arrives_at = self._time.now() + self.way_seconds
        sent = bisect.bisect_right(self._sent_at, arrives_at)
        self._pool.happens(self, reply, arrives_at, arrives_at - self._sent_at[sent - 1])
        del self._sent_at[: max(0, sent - 64)]


class VirtualPool(LinkPool):
    """A `DraftPool`."""

    def __init__(self, time: VirtualTime, trial_share: float) -> None:
        self.time = time
        self.trial_share = trial_share
        self.drafts: list[VirtualDraft] = []
        self._numbers = itertools.count()
        self._coming: list[tuple[float, int, LinkEvent]] = []

    @property
    def num_endpoints(self) -> int:
        return len(self.drafts)

    @property
    def num_links_up(self) -> int:
        return sum(draft.is_up for draft in self.drafts)

    def happens(
        self, draft: VirtualDraft, event: LinkState | SpeculateReply, at: float, answer_seconds: float = 0.0
    ) -> None:
        happened = LinkEvent(cast(DraftLink, draft), event, answer_seconds)
        heapq.heappush(self._coming, (at, next(self._numbers), happened))

    def poll(self, timeout: float = 0.0) -> list[LinkEvent]:
        now = self.time.now()
        until = now + timeout
        while True:
            horizon = max(now, min(until, self._coming[0][0] if self._coming else math.inf))
            first = min(self.drafts, key=lambda draft: draft.due_at, default=None)
            if first is None or first.due_at > horizon:
                break
            first.step()
        self.time.sleep_until(horizon)
        events = []
        while self._coming and self._coming[0][0] <= self.time.now():
            events.append(heapq.heappop(self._coming)[2])
        return [event for event in events if not isinstance(event.event, SpeculateReply) or event.link.is_up]

    async def run(self, endpoints: AsyncIterator[Sequence[str]]) -> None:
        """They are linked from the start."""

    def readings(self) -> Iterator[Reading]:
        return iter(())


@dataclass(slots=True)
class VirtualCluster:
    """`config` has simulated engines. `drafts` are its draft workers; none given: as many as it says, all alike."""

    config: Config
    drafts: Sequence[Draft] = ()
    on_step: Callable[[Sequence[GenerationOutput]], None] = lambda outputs: None
    make_target: Callable[..., SimulatedTarget] = SimulatedTarget
    time: VirtualTime = field(default_factory=VirtualTime)
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_rounds: int = 0  # sequences in steps
    pool: VirtualPool = field(init=False)
    target: SimulatedTarget = field(init=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        config, simulation = self.config, self.config.simulation
        self.pool = VirtualPool(self.time, config.placement.trial_share)
        alike = [Draft(simulation, round_trip_seconds=simulation.round_trip_ms / 1e3)] * config.draft.replicas
        self.pool.drafts = [
            VirtualDraft(index, draft, config, self.pool) for index, draft in enumerate(self.drafts or alike)
        ]
        self.target = self.make_target(
            simulation,
            _VOCAB_SIZE,
            StepLimits.of(config.target, config.target.max_model_len or 100_000),
            BlockManager(_NUM_BLOCKS, config.target.block_size, enable_prefix_caching=False),
            self.pool,
            config.speculation,
            self.time,
        )
        for draft in self.pool.drafts:
            draft.start()
        self.target.profile()

    def submit(self, max_tokens: int, *, prompt_len: int = 8, num_speculative_tokens: int | None = None) -> str:
        seed = next(self._numbers)
        request = simulated_request(seed, _VOCAB_SIZE, prompt_len, max_tokens, num_speculative_tokens)
        self.target.submit(request)
        return request.request_id

    def run(self, seconds: float) -> float:
        """Steps for so long while there are requests; returns the tokens that were committed a second."""
        started_at, before = self.time.now(), self.num_tokens
        while self.time.now() < started_at + seconds and self.step():
            pass
        return (self.num_tokens - before) / max(self.time.now() - started_at, 1e-9)

    def step(self) -> bool:
        """One step of the target; False when there is nothing to do."""
        return self.target.run_step(self._publish)

    def readings(self, name: str) -> dict[tuple[str, ...], float]:
        """Of the target, by the values of its labels."""
        found = [reading for reading in self.target.readings() if reading.name == name]
        return {tuple(reading.labels.values()): reading.value for reading in found}

    def _publish(self, outputs: Sequence[GenerationOutput]) -> None:
        self.num_tokens += sum(len(output.token_ids) for output in outputs)
        self.num_draft_tokens += sum(output.num_draft_tokens for output in outputs)
        self.num_rounds += len(outputs)
        self.on_step(outputs)
