"""A cluster in virtual time: the router's choice, and what happens next.

Everything that happens is an event with a time: a request comes, a step ends, a proposal arrives that is waited for, a
draft worker hears of something. Events are taken in the order of their times, so that nobody knows of what comes later.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from cluster.config import Config
from cluster.config_simulation import SimulationConfig
from cluster.errors import ConfigurationError
from cluster.simulator.chances import Chances
from cluster.simulator.columns import NEVER, Columns
from cluster.simulator.draft import DraftWorker, Sent
from cluster.simulator.figures import Figures, Recorder, Worker
from cluster.simulator.overheads import PROGRAMS, Programs
from cluster.simulator.rounds import Link, Rounds
from cluster.simulator.target import Request, Target
from cluster.simulator.traffic import Arrival, Traffic

_MAX_WORKERS = 10_000  # of a pool
_MIN_STEP_MS, _MAX_MS = 1e-3, 3_600_000.0
_SPARE_ROWS = 2  # times the sequences that run: those that were preempted keep theirs


@dataclass(frozen=True, slots=True)
class Span:
    """What is looked at, in seconds since the beginning."""

    warm_up: float
    until: float
    interval: float = 10.0
    is_cut: bool = False  # whatever still runs then is left alone; else all is answered that came


class SimulatedCluster:
    """`run` once."""

    def __init__(
        self,
        config: Config,
        traffic: Traffic,
        num_blocks: int,
        span: Span,
        seed: int = 0,
        programs: Programs = PROGRAMS,
    ) -> None:
        """Its steps take what `config.simulation` says; each target has `num_blocks` KV blocks.

        Raises ConfigurationError for what is not simulated.
        """
        check(config)
        self.now = 0.0
        self._config = config
        self._traffic = traffic
        self._span = span
        self._programs = programs
        num_targets, target = config.target.replicas, config.target
        self.recorder = Recorder(num_targets, span.warm_up, span.until, span.interval, programs.answer)
        num_rows = _SPARE_ROWS * target.max_num_seqs
        self._columns = Columns(num_targets * num_rows)
        is_sidecar, is_drafted = config.has_sidecars, config.has_draft_workers
        num_drafts = config.draft.replicas if is_drafted else 0
        way = config.simulation.round_trip_ms / 2e3 + programs.hand_over
        rng = np.random.default_rng(seed)
        self._chances = Chances(config.simulation, rng, self._clock)
        self._drafts = [
            DraftWorker(index, config, self._columns, self._chances, way, programs.draft, (span.warm_up, span.until))
            for index in range(num_drafts * (num_targets if is_sidecar else 1))
        ]
        self._targets = []
        for index in range(num_targets):
            first = index * num_drafts if is_sidecar else 0
            links = [Link(number, way) for number in range(first, first + num_drafts)]
            rows = range(index * num_rows, (index + 1) * num_rows)
            rounds = Rounds(config, self._columns, rows, links, first, self._clock, self._told)
            self._targets.append(
                Target(index, config, num_blocks, self._columns, rows, rounds, self.recorder, programs.target)
            )
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._due_at = [NEVER] * num_targets  # the end of a step, or when to wake
        self._num_in_flight = 0
        self._has_begun = False

    def _clock(self) -> float:
        return self.now

    def run(self, on_progress: Callable[[float], None] = lambda seconds: None) -> None:
        """`on_progress` is called with the seconds that have passed, whenever one more has."""
        arrivals = self._traffic.arrivals()

        def next_arrival() -> None:
            arrival = next(arrivals, None)
            if arrival is not None:
                self._at(arrival.seconds, lambda: come(arrival))

        def come(arrival: Arrival) -> None:
            self._ask(arrival)
            next_arrival()

        next_arrival()
        told = 0.0
        while self._events:
            at, _, event = heapq.heappop(self._events)
            if self._span.is_cut and at > self._span.until:
                break
            self.now = at
            event()
            if at >= told + 1.0:
                told = at
                on_progress(at)

    def figures(self, dollars_per_hour: float | None = None) -> Figures:
        targets = [
            Worker(
                f"target {target.index}",
                0.0,
                kv_used=target.blocks.most_used / target.blocks.num_blocks,
                num_preemptions=target.num_preemptions,
            )
            for target in self._targets
        ]
        drafts = [
            Worker(
                f"draft {draft.index}",
                draft.busy_seconds / self.recorder.seconds(self.now),
                mean_batch=draft.num_counted_rows / max(draft.num_counted_steps, 1),
            )
            for draft in self._drafts
        ]
        return self.recorder.figures(self.now, targets, drafts, dollars_per_hour)

    @property
    def num_blocks_in_use(self) -> int:
        return sum(target.blocks.num_blocks - target.blocks.num_free for target in self._targets)

    @property
    def num_draft_steps(self) -> int:
        return sum(draft.num_steps for draft in self._drafts)

    def _at(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._numbers), event))

    # Requests.

    def _ask(self, arrival: Arrival) -> None:
        """As `Admission` and `ReplicaPool.find` of the router: too many are refused, others go to the target with the
        fewest."""
        number = self.recorder.arrived(self.now, arrival.answer_tokens)
        target = min(self._targets, key=lambda one: one.num_in_flight)
        fits = target.blocks.fits(arrival.prompt_tokens + arrival.answer_tokens)
        if self._num_in_flight >= self._config.router.max_waiting_requests or not fits:
            self.recorder.refused(number)
            return
        if not self._has_begun:
            self._has_begun = True
            self._chances.start()
        self._num_in_flight += 1
        target.num_in_flight += 1
        request = Request(number, arrival.prompt_tokens, arrival.answer_tokens)
        self._at(self.now + self._programs.router, lambda: self._submit(target, request))

    def _submit(self, target: Target, request: Request) -> None:
        target.submit(request)
        if target.is_idle:
            self._follow(target, target.begin(self.now))

    def _ended(self) -> None:
        for _, at in self.recorder.ended:
            self._num_in_flight -= 1
            arrival = self._traffic.after(at)
            if arrival is not None:
                self._at(at, partial(self._ask, arrival))
        self.recorder.ended.clear()

    # Targets.

    def _follow(self, target: Target, due_at: float | None) -> None:
        """`target` has something to do then."""
        self._due_at[target.index] = NEVER if due_at is None else due_at
        if due_at is not None:
            self._at(due_at, lambda: self._turn_target(target, due_at))

    def _turn_target(self, target: Target, due_at: float) -> None:
        if self._due_at[target.index] != due_at:
            return  # it was put off, or came sooner
        self._follow(target, target.wake(self.now) if target.rounds.waits.is_waiting else target.end_step(self.now))
        if self.recorder.ended:
            self._ended()

    # Drafts.

    def _told(self, draft_index: int, arrives_at: float, is_changed: bool) -> None:
        draft = self._drafts[draft_index]
        draft.is_changed = draft.is_changed or is_changed
        if draft.step is None and arrives_at < draft.wakes_at:
            draft.wakes_at = arrives_at
            self._at(arrives_at, lambda: self._wake_draft(draft, arrives_at))

    def _wake_draft(self, draft: DraftWorker, at: float) -> None:
        if draft.step is None and draft.wakes_at == at:
            self._turn_draft(draft)

    def _turn_draft(self, draft: DraftWorker) -> None:
        sent, next_at = draft.turn(self.now, self._refuse)
        if sent is not None:
            self._deliver(draft, sent)
        if draft.step is not None:
            self._at(next_at, lambda: self._end_draft_step(draft))
        elif next_at < NEVER:
            self._at(next_at, lambda: self._wake_draft(draft, next_at))

    def _end_draft_step(self, draft: DraftWorker) -> None:
        sent = draft.end_step(self.now)
        if sent is not None:
            self._deliver(draft, sent)
        self._turn_draft(draft)

    def _deliver(self, draft: DraftWorker, sent: Sent) -> None:
        columns = self._columns
        counts = np.bincount(columns.target[sent.rows])
        waited = np.bincount(columns.target[sent.rows][columns.is_waited_for[sent.rows]], minlength=len(counts))
        for index in counts.nonzero()[0].tolist():
            target = self._targets[index]
            target.rounds.heard(draft.index, float(draft.step_seconds[index]), int(draft.batches[index]))
            if waited[index]:
                due_at = target.rounds.waits.wakes_at()
                if due_at is not None and due_at != self._due_at[index]:
                    self._follow(target, due_at)

    def _refuse(self, row: int, arrives_at: float) -> None:
        columns = self._columns
        epoch, target = int(columns.epoch[row]), self._targets[int(columns.target[row])]

        def turn_away() -> None:
            if columns.epoch[row] == epoch:
                target.rounds.turned_away(row, self.now)

        self._at(arrives_at, turn_away)


def check(config: Config) -> None:
    """Raises ConfigurationError for what is not simulated."""
    limits = config.target
    _check_times(config.simulation)
    if max(config.target.replicas, config.draft.replicas) > _MAX_WORKERS:
        raise ConfigurationError(f"more than {_MAX_WORKERS:,} workers of a pool are not simulated: set fewer replicas")
    if config.speculation.tree_width > 1:
        raise ConfigurationError(
            f"speculation.tree_width {config.speculation.tree_width}: chains only are simulated: set it to 1"
        )
    if config.drafts_in_process:
        raise ConfigurationError("draft.placement in-process is not simulated: set it to pool or sidecar")
    if config.has_drafter and config.speculation.max_speculative_tokens == 0:
        raise ConfigurationError("speculation.max_speculative_tokens 0: set num_speculative_tokens to 0 instead")
    if limits.max_num_batched_tokens < limits.max_num_seqs:
        raise ConfigurationError(
            f"target.max_num_batched_tokens {limits.max_num_batched_tokens} is less than target.max_num_seqs "
            f"{limits.max_num_seqs}: every sequence needs a token in every step"
        )


def _check_times(simulation: SimulationConfig) -> None:
    """In a step that took no time nothing would ever end; beyond the other bound numbers run out."""
    for name, times, least in (
        ("target_step_ms", [ms for _, ms in simulation.target_step_ms], _MIN_STEP_MS),
        ("draft_step_ms", [ms for _, ms in simulation.draft_step_ms], 0.0),
        ("target_sequence_ms", [simulation.target_sequence_ms], 0.0),
        ("round_trip_ms", [simulation.round_trip_ms], 0.0),
    ):
        if not least <= min(times) <= max(times) <= _MAX_MS:
            raise ConfigurationError(
                f"simulation.{name} from {min(times):g} to {max(times):g}: what is simulated takes {least:g} to "
                f"{_MAX_MS:,.0f} ms"
            )
