"""A cluster in virtual time: traffic, the router's choice, and targets that share draft workers.

Each target runs its real step loop with its own clock (`turns`). Requests are events between the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from cluster.config import Config
from cluster.config.simulation import SimulationConfig
from cluster.coordination.base import LinkPool
from cluster.engine.blocks import BlockManager
from cluster.errors import ConfigurationError, InvalidRequestError
from cluster.planning.overheads import PROGRAMS, Programs
from cluster.simulator.drafts import VOCAB_SIZE, SimulatedDraft, VirtualDraft, VirtualPool, draft_limits, target_limits
from cluster.simulator.figures import Figures, Recorder, WorkerFigures
from cluster.simulator.traffic import Arrival, EndedRequest, Traffic
from cluster.simulator.turns import NEVER, Over, TargetTime, Turns
from cluster.simulator.virtual import simulated_request
from cluster.simulator.workers import RecordedDrafter, RecordedTarget
from cluster.targets.base import GenerationOutput
from cluster.targets.in_process import InProcessPool

_MAX_WORKERS = 256  # workers per pool; each target is a thread
_MIN_STEP_MS, _MAX_MS = 1e-3, 3_600_000.0
_MAX_REQUESTS = 2**32  # requests per run; their seeds follow the run's
_IDLE_SECONDS = 1e-3  # pause after a step in which nothing could be scheduled


@dataclass(slots=True)
class InFlight:
    """Requests of the router at one target."""

    number: int = 0
    without_token: dict[int, Arrival] = field(default_factory=dict)  # requests without a first token, by number


Choose = Callable[[Arrival, Sequence[InFlight]], int]
"Returns the index of a request's target, given the requests in flight at each."


def least_loaded(arrival: Arrival, in_flight: Sequence[InFlight]) -> int:
    """Returns the target with the fewest requests."""
    return min(range(len(in_flight)), key=lambda index: in_flight[index].number)


@dataclass(frozen=True, slots=True)
class MeasuredSpan:
    """Time that the figures cover, in seconds since the start."""

    warm_up: float
    until: float
    interval: float = 10.0
    is_cut: bool = False  # True: the run ends at `until`; False: it ends when all requests are answered


class SimulatedCluster:
    """Simulated cluster; `run` may be called once."""

    def __init__(
        self,
        config: Config,
        traffic: Traffic,
        num_blocks: int,
        span: MeasuredSpan,
        seed: int = 0,
        programs: Programs = PROGRAMS,
        choose: Choose = least_loaded,
    ) -> None:
        """Builds the cluster of `config` with `num_blocks` KV blocks for each target.

        `choose` returns the target of each request that is not refused. Raises ConfigurationError if `config` cannot be
        simulated.
        """
        check(config)
        self._config = config
        self._traffic = traffic
        self._span = span
        self._programs = programs
        self._choose = choose
        self._running: dict[int, _Request] = {}  # by number
        self._first_seed = seed % 2**31 * _MAX_REQUESTS
        self._turns = Turns()
        self._now = self._shown = 0.0
        self._num_in_flight = 0
        num_targets, is_shared = config.target.replicas, not (config.has_sidecars or config.drafts_in_process)
        num_drafts = _num_drafts(config) * (1 if is_shared else num_targets)
        self.recorder = Recorder(num_targets, num_drafts, span.warm_up, span.until, span.interval, programs.answer)
        drafts = [] if _drafts_in_turn(config) else [self._new_draft(index) for index in range(num_drafts)]
        self._drafts = drafts
        self._targets: list[_Target] = []
        for index in range(num_targets):
            own = drafts if is_shared else drafts[index * _num_drafts(config) : (index + 1) * _num_drafts(config)]
            self._targets.append(self._new_target(index, num_blocks, own))
        for draft in drafts:
            draft.start()

    def _new_draft(self, index: int) -> VirtualDraft:
        simulation, programs = self._config.simulation, self._programs
        is_in_process = self._config.drafts_in_process
        wanted = SimulatedDraft(
            simulation,
            round_trip_seconds=0.0 if is_in_process else simulation.round_trip_ms / 1e3,
            make_drafter=partial(RecordedDrafter, drafted=partial(self.recorder.drafted, index)),
            hand_over_seconds=0.0 if is_in_process else programs.hand_over,
            overheads=programs.draft,
        )
        return VirtualDraft(index, wanted, self._config)

    def _new_pool(self, index: int, time: TargetTime, drafts: Sequence[VirtualDraft]) -> LinkPool:
        config = self._config
        if not _drafts_in_turn(config):
            return VirtualPool(time, config.placement.trial_share, drafts)
        drafted, overheads = partial(self.recorder.drafted, index), self._programs.draft
        limits = draft_limits(config)
        drafter = RecordedDrafter(
            config.simulation,
            VOCAB_SIZE,
            limits,
            time,
            config.context_tokens,
            drafted=drafted,
            overheads=overheads,
        )
        return InProcessPool(drafter, "simulated", config.speculation, keeper=time)

    def _new_target(self, index: int, num_blocks: int, drafts: Sequence[VirtualDraft]) -> _Target:
        config, time = self._config, self._turns.new_clock()
        pool = self._new_pool(index, time, drafts)
        engine = RecordedTarget(
            config.simulation,
            VOCAB_SIZE,
            target_limits(config),
            BlockManager(
                num_blocks, config.target.block_size, enable_prefix_caching=config.target.enable_prefix_caching
            ),
            pool,
            config.speculation,
            time,
            overheads=self._programs.target,
        )
        engine.profile()
        return _Target(index, engine, time)

    def run(self, on_progress: Callable[[float], None] = lambda seconds: None) -> None:
        """Runs the traffic to its end. Calls `on_progress` with the time about once per virtual second."""
        arrivals = self._traffic.arrivals()

        def next_arrival() -> None:
            arrival = next(arrivals, None)
            if arrival is not None:
                self._turns.at(arrival.seconds, lambda: come(arrival))

        def come(arrival: Arrival) -> None:
            self._ask(arrival)
            next_arrival()

        next_arrival()
        if self._span.is_cut:
            self._turns.at(self._span.until, self._end)
        self._turns.run([partial(self._serve, target, on_progress) for target in self._targets])

    def figures(self, dollars_per_hour: float | None = None) -> Figures:
        targets = [
            WorkerFigures(
                f"target {target.index}",
                0.0,
                kv_used=target.engine.most_used_blocks / target.engine.load().num_blocks,
                num_preemptions=target.engine.num_preemptions,
            )
            for target in self._targets
        ]
        works = [draft.worker.seconds_of for draft in self._drafts]
        return self.recorder.figures(self._now, targets, dollars_per_hour, works)

    @property
    def num_blocks_in_use(self) -> int:
        return sum(target.engine.num_used_blocks for target in self._targets)

    # Requests.

    def _ask(self, arrival: Arrival) -> None:
        """Handles a request as the router does (`Admission`, `ReplicaPool.find`).

        Refuses the request if too many are in flight. Otherwise chooses a target for it.
        """
        number = self.recorder.arrived(arrival.seconds, arrival.answer_tokens)
        if self._num_in_flight >= self._config.router.max_waiting_requests:
            self.recorder.refused(number)
            return
        target = self._targets[self._choose(arrival, [one.in_flight for one in self._targets])]
        self._num_in_flight += 1
        target.in_flight.number += 1
        target.in_flight.without_token[number] = arrival
        at = arrival.seconds + self._programs.router
        self._turns.at(at, lambda: self._submit(target, number, arrival, at))

    def _submit(self, target: _Target, number: int, arrival: Arrival, at: float) -> None:
        seed = self._first_seed + number
        request = simulated_request(
            seed, VOCAB_SIZE, arrival.prompt_tokens, arrival.answer_tokens, None, arrival.token_ids
        )
        self._now = max(self._now, at)
        self._running[number] = _Request(arrival, target)
        try:
            target.engine.submit(request)
        except InvalidRequestError:
            self.recorder.refused(number)
            del self._running[number]
            self._leave(target, number)
            return
        target.wakes_at = min(target.wakes_at, at)

    def _leave(self, target: _Target, number: int) -> None:
        self._num_in_flight -= 1
        target.in_flight.number -= 1
        target.in_flight.without_token.pop(number, None)

    def _answered(self, number: int, at: float) -> None:
        """Records that a client has its whole answer, and schedules the client's next request, if any."""
        request = self._running.pop(number)
        self._leave(request.target, number)
        self._now = max(self._now, at)
        arrival = self._traffic.after(request.answer(at))
        if arrival is not None:
            self._turns.at(max(at, arrival.seconds), lambda: self._ask(arrival))

    def _end(self) -> None:
        self._now = self._span.until
        raise Over

    # A target's thread.

    def _serve(self, target: _Target, on_progress: Callable[[float], None]) -> None:
        """Runs the steps of `target` until the run is over."""
        outputs: list[GenerationOutput] = []
        while True:
            started_at = target.time.now()
            if not target.engine.run_step(outputs.extend):
                target.wakes_at = NEVER
                target.time.let_others(lambda: target.wakes_at)
                target.time.seconds = target.wakes_at
                continue
            now = target.time.now()
            if target.engine.last_step is not None:
                self._take(target, now, outputs)
                outputs = []
            elif now == started_at:  # nothing could be scheduled: time has to advance
                target.time.sleep_until(now + _IDLE_SECONDS)
            if now >= self._shown + 1.0:
                self._shown = now
                on_progress(now)

    def _take(self, target: _Target, now: float, outputs: Sequence[GenerationOutput]) -> None:
        """Records a step and its committed tokens."""
        step, target.engine.last_step = target.engine.last_step, None
        assert step is not None
        self.recorder.stepped(target.index, now, step, outputs)
        for output in outputs:
            is_finished, number = output.finish_reason is not None, int(output.request_id) - self._first_seed
            self.recorder.committed(number, now, is_finished=is_finished)
            at = now + self._programs.answer
            self._running[number].take(output, at)
            target.in_flight.without_token.pop(number, None)
            if is_finished:
                self._turns.at(at, partial(self._answered, number, at))


@dataclass(slots=True)
class _Target:
    index: int
    engine: RecordedTarget
    time: TargetTime
    in_flight: InFlight = field(default_factory=InFlight)
    wakes_at: float = NEVER  # NEVER: idle


@dataclass(slots=True)
class _Request:
    """A request at its target, and the part of the answer that its client has."""

    arrival: Arrival
    target: _Target
    first_token_at: float | None = None
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0

    def take(self, output: GenerationOutput, at: float) -> None:
        if self.first_token_at is None:
            self.first_token_at, self.num_cached_tokens = at, output.num_cached_tokens
        self.token_ids += output.token_ids

    def answer(self, at: float) -> EndedRequest:
        assert self.first_token_at is not None
        first_token_at, target = self.first_token_at, self.target.index
        return EndedRequest(self.arrival, at, first_token_at, self.token_ids, target, self.num_cached_tokens)


def _drafts_in_turn(config: Config) -> bool:
    """Returns True if drafters compute in the thread of the target's steps."""
    return config.drafts_in_process and config.draft.in_process_threads != "own"


def _num_drafts(config: Config) -> int:
    """Returns the number of drafters: in total or, if each target has its own, per target."""
    if config.drafts_in_process:
        return 1
    return config.draft.replicas if config.has_draft_workers else 0


def check(config: Config) -> None:
    """Raises ConfigurationError if `config` cannot be simulated."""
    limits = config.target
    _check_times(config.simulation)
    if max(config.target.replicas, config.draft.replicas) > _MAX_WORKERS:
        raise ConfigurationError(
            f"more than {_MAX_WORKERS:,} workers of a pool cannot be simulated: set fewer replicas"
        )
    if limits.max_num_batched_tokens < limits.max_num_seqs:
        raise ConfigurationError(
            f"target.max_num_batched_tokens {limits.max_num_batched_tokens} is less than target.max_num_seqs "
            f"{limits.max_num_seqs}: every sequence needs a token in every step"
        )


def _check_times(simulation: SimulationConfig) -> None:
    """Raises ConfigurationError for step times of 0, which never end a run, and for extreme ones."""
    for name, times, least in (
        ("target_step_ms", [ms for _, ms in simulation.target_step_ms], _MIN_STEP_MS),
        ("draft_step_ms", [ms for _, ms in simulation.draft_step_ms], 0.0),
        ("target_sequence_ms", [simulation.target_sequence_ms], 0.0),
        ("round_trip_ms", [simulation.round_trip_ms], 0.0),
    ):
        if not least <= min(times) <= max(times) <= _MAX_MS:
            raise ConfigurationError(
                f"simulation.{name} from {min(times):g} to {max(times):g}: the simulator supports {least:g} to "
                f"{_MAX_MS:,.0f} ms"
            )
