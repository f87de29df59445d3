"""Draft workers in virtual time: the real `DraftWorker`, and links that deliver messages after half a round trip.

The clock of a draft worker lags behind the clocks of its targets. The worker takes its turns while a target polls its
links, at a time that all targets' clocks have reached. So every message that can arrive by that time has been sent
(`turns`).
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from cluster.config import Config
from cluster.config.simulation import SimulationConfig
from cluster.coordination.base import LinkEvent, LinkPool, LinkState
from cluster.drafters.simulated import SimulatedDrafter
from cluster.drafting.worker import DraftWorker
from cluster.engine.limits import StepLimits
from cluster.planning.overheads import NO_OVERHEADS, Overheads
from cluster.simulator.turns import NEVER, VirtualTime
from cluster.telemetry.metrics import Reading
from cluster.wire.messages import SpeculateReply, SpeculateRequest

VOCAB_SIZE = 1000
HAND_OVER_SECONDS = 0.0003  # one message between two processes of one machine
_MAX_MODEL_LEN = 10**9  # used if the configuration has none
_NUM_SENDS = 64  # messages that a link remembers


@dataclass(frozen=True, slots=True)
class SimulatedDraft:
    """Description of a draft worker."""

    simulation: SimulationConfig
    name: str = "simulated"  # name of its model
    round_trip_seconds: float = 0.0
    expected_round_trip: float | None = None  # estimated from the labels
    make_drafter: Callable[..., SimulatedDrafter] = SimulatedDrafter
    hand_over_seconds: float = HAND_OVER_SECONDS
    overheads: Overheads = NO_OVERHEADS

    @property
    def way_seconds(self) -> float:
        return self.round_trip_seconds / 2 + self.hand_over_seconds


def draft_limits(config: Config) -> StepLimits:
    return StepLimits.of(config.draft, config.draft.max_model_len or config.target.max_model_len or _MAX_MODEL_LEN)


def target_limits(config: Config) -> StepLimits:
    return StepLimits.of(config.target, config.target.max_model_len or _MAX_MODEL_LEN)


class VirtualDraft:
    """A draft worker that serves the links of one or more targets."""

    def __init__(self, index: int, wanted: SimulatedDraft, config: Config) -> None:
        self.address = f"draft-{index}"
        self.wanted = wanted
        self.is_up = False
        self.due_at = NEVER  # time of its next event
        self.time = VirtualTime()
        self.links: list[VirtualLink] = []
        self._stepped_at = 0.0
        self._limits = draft_limits(config)
        self._context_tokens = config.context_tokens
        self._branches = config.speculation.num_run_ahead_branches
        self._inbox: deque[tuple[float, int, SpeculateRequest]] = deque()  # in order of arrival
        self._new_worker()

    def _new_worker(self) -> None:
        self._drafter = self.wanted.make_drafter(
            self.wanted.simulation, VOCAB_SIZE, self._limits, self.time, self._context_tokens
        )
        self.worker = DraftWorker(self._drafter, self._branches, clock=self.time.now)
        for link in self.links:
            link.attach()

    def start(self) -> None:
        now = self.links[0].pool.time.now()
        self.time.sleep_until(now)
        self.is_up = True
        for link in self.links:
            link.pool.happens(link, LinkState.UP, now)
        self._look_ahead()

    def kill(self) -> None:
        """Ends the worker, which loses its sequences. `start` starts a new worker, which serves the draft `wanted`."""
        self.is_up = False
        self._inbox.clear()
        for link in self.links:
            link.pool.happens(link, LinkState.DOWN, link.pool.time.now())
        self._new_worker()
        self._look_ahead()

    def receive(self, arrives_at: float, link: int, request: SpeculateRequest) -> None:
        assert arrives_at >= self._stepped_at, "a message arrives before a turn that was taken"
        if self.is_up:
            self._inbox.append((arrives_at, link, request))
            self._look_ahead()

    def step(self) -> None:
        """Runs one turn of the worker's loop at `due_at`. All messages that arrive by then must have been sent."""
        due_at = self._stepped_at = self.due_at
        while self._inbox and self._inbox[0][0] <= due_at:
            self.time.seconds, link, request = self._inbox.popleft()  # the worker records the arrival
            self.worker.receive(link, request)
        self.time.seconds = due_at
        self.worker.step()
        self._look_ahead()

    def _look_ahead(self) -> None:
        self.due_at = NEVER
        if not self.is_up:
            return
        now, idle = self.time.now(), self.worker.idle_seconds
        if idle is not None:
            self.due_at = now + idle
        if self._inbox:
            self.due_at = min(self.due_at, max(now, self._inbox[0][0]))
        self.due_at += self.wanted.overheads.seconds(self._drafter.batch)


class VirtualLink:
    """A simulated link from a target to a draft worker; implements `cluster.coordination.base.Link`."""

    def __init__(self, draft: VirtualDraft, pool: VirtualPool) -> None:
        self.address = draft.address
        self.is_one_pass = draft.wanted.simulation.is_one_pass
        self.expected_round_trip = draft.wanted.expected_round_trip
        self.draft = draft
        self.pool = pool
        self._sent_at: list[float] = []
        self.attach()

    def attach(self) -> None:
        """Attaches the link to the draft's new worker."""
        self.model = self.draft.wanted.name
        self._number = self.draft.worker.attach(self._deliver)

    def send(self, request: SpeculateRequest) -> None:
        now = self.pool.time.now()
        self._sent_at.append(now)
        self.draft.receive(now + self.draft.wanted.way_seconds, self._number, request)

    def _deliver(self, reply: SpeculateReply) -> None:
        arrives_at = self.draft.time.now() + self.draft.wanted.way_seconds
        sent = bisect.bisect_right(self._sent_at, arrives_at)
        self.pool.happens(self, reply, arrives_at, arrives_at - self._sent_at[sent - 1])
        del self._sent_at[: max(0, sent - _NUM_SENDS)]


class VirtualPool(LinkPool):
    """Links of one target, in place of a `DraftPool`."""

    def __init__(self, time: VirtualTime, trial_share: float, drafts: Sequence[VirtualDraft]) -> None:
        self.time = time
        self.trial_share = trial_share
        self.drafts = drafts
        for draft in drafts:
            draft.links.append(VirtualLink(draft, self))
        self._numbers = itertools.count()
        self._coming: list[tuple[float, int, LinkEvent]] = []
        self._polled_at = self._polls_until = 0.0

    @property
    def num_endpoints(self) -> int:
        return len(self.drafts)

    @property
    def num_links_up(self) -> int:
        return sum(draft.is_up for draft in self.drafts)

    def happens(
        self, link: VirtualLink, event: LinkState | SpeculateReply, at: float, answer_seconds: float = 0.0
    ) -> None:
        heapq.heappush(self._coming, (at, next(self._numbers), LinkEvent(link, event, answer_seconds)))

    def poll(self, timeout: float = 0.0) -> list[LinkEvent]:
        self._polled_at = self.time.now()
        self._polls_until = self._polled_at + timeout
        while True:
            self.time.let_others(self._due_at)
            first = min(self.drafts, key=attrgetter("due_at"), default=None)
            if first is None or first.due_at > self._returns_at():
                break
            first.step()
        self.time.seconds = max(self.time.seconds, self._returns_at())
        events = []
        while self._coming and self._coming[0][0] <= self.time.now():
            events.append(heapq.heappop(self._coming)[2])
        return [happened for happened in events if self._is_heard(happened)]

    async def run(self, endpoints: AsyncIterator[Sequence[str]]) -> None:
        """Does nothing: the links are up from the start."""

    def readings(self) -> Iterator[Reading]:
        return iter(())

    def _returns_at(self) -> float:
        """Returns the time at which the poll returns if no further message is sent."""
        comes_at = self._coming[0][0] if self._coming else NEVER
        return max(self._polled_at, min(self._polls_until, comes_at))

    def _due_at(self) -> float:
        """Returns the time at which the poll returns or a draft worker takes a turn."""
        return min(self._returns_at(), min([draft.due_at for draft in self.drafts], default=NEVER))

    def _is_heard(self, happened: LinkEvent) -> bool:
        """Returns False for a reply whose worker has died in the meantime."""
        assert isinstance(happened.link, VirtualLink)
        return isinstance(happened.event, LinkState) or happened.link.draft.is_up
