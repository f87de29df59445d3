"""Measurements of a cluster under a known load."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

MAX_DEPTH = 16  # deepest draft position that is examined
_ALIKE = 1.25  # maximum ratio of row numbers that are combined
_REACHED_SHARE = 0.8  # minimum share of the requested drafts to reach a depth: the last rounds of answers have fewer


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Number and total seconds of steps of one kind."""

    count: float = 0.0
    seconds: float = 0.0  # total time of the steps

    @property
    def mean_seconds(self) -> float:
        return self.seconds / self.count if self.count else 0.0

    def times(self, factor: float) -> StepTotals:
        """Returns the same number of steps, each `factor` times as long."""
        return StepTotals(self.count, factor * self.seconds)

    def __add__(self, other: StepTotals) -> StepTotals:
        return StepTotals(self.count + other.count, self.seconds + other.seconds)


@dataclass(frozen=True, slots=True)
class Counts:
    """Increase of the counters during `seconds` of a load. Times of steps are sums over all targets."""

    seconds: float = 0.0
    num_tokens: float = 0.0  # committed tokens
    num_rounds: float = 0.0  # rounds with at least one draft token
    num_draft_tokens: float = 0.0
    num_accepted_tokens: float = 0.0
    accepted_by_position: tuple[float, ...] = ()
    verify: StepTotals = StepTotals()
    decode: StepTotals = StepTotals()
    prefill: StepTotals = StepTotals()
    draft: StepTotals = StepTotals()
    wait_seconds: float = 0.0  # time that steps waited for proposals
    busy_seconds: float = 0.0  # time with work: steps, waits for proposals, and the time between steps
    num_preemptions: float = 0.0
    num_refusals: float = 0.0  # sequences refused by draft workers without room
    waiting_seconds: float = 0.0  # time that sequences waited for blocks, summed over sequences
    # By limit (`first_token_ms`, `output_token_ms`): requests within it, and all requests that have it.
    within_limits: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_busy_second(self) -> float:
        """Committed tokens per second of busy time. Busy time excludes waits for requests."""
        return self.num_tokens / max(self.busy_seconds, 1e-9)

    @property
    def bookkeeping_a_step(self) -> float:
        """Busy seconds per step, without the step itself and without the wait for proposals."""
        steps = (self.verify + self.decode + self.prefill).seconds
        return max(0.0, self.busy_seconds - steps - self.wait_seconds) / max(self.num_steps, 1.0)

    @property
    def num_steps(self) -> float:
        return self.verify.count + self.decode.count + self.prefill.count

    @property
    def mean_batch(self) -> float:
        """Mean number of sequences in a step. Each sequence commits its accepted drafts and one more token."""
        return (self.num_tokens - self.num_accepted_tokens) / self.num_steps if self.num_steps else 0.0

    @property
    def mean_depth(self) -> float:
        """Mean number of draft tokens verified in a round."""
        return self.num_draft_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def survival(self) -> tuple[float, ...]:
        """For depths 1, 2, ...: share of the rounds whose draft at that depth was committed."""
        if not self.num_rounds:
            return ()
        return tuple(min(1.0, accepted / self.num_rounds) for accepted in self.accepted_by_position)

    @property
    def tokens_per_round(self) -> float:
        """Committed tokens per round (the acceptance length)."""
        return 1.0 + self.num_accepted_tokens / self.num_rounds if self.num_rounds else 1.0

    def prompt_seconds(self, step_seconds: float) -> float:
        """Returns the seconds that prompts add to steps, per committed token.

        A step without prompts takes `step_seconds`.
        """
        added = max(0.0, self.prefill.seconds - self.prefill.count * step_seconds)
        return added / self.num_tokens if self.num_tokens else 0.0

    @property
    def rows(self) -> float:
        """Rows per step: its sequences and their drafts."""
        return self.mean_batch * (1.0 + self.mean_depth)

    @property
    def mean_waiting(self) -> float:
        """Mean number of sequences that waited for blocks."""
        return self.waiting_seconds / self.seconds if self.seconds else 0.0

    @property
    def wait_a_step(self) -> float:
        """Mean wait for proposals of a step with drafts, in seconds; includes steps with prompts."""
        return self.wait_seconds * self.mean_batch / self.num_rounds if self.num_rounds else 0.0


class TimeCurve:
    """Seconds as a function of a number such as a step's rows.

    Linear between measurements, and extrapolated from the last two.
    """

    def __init__(self, steps: Iterable[tuple[float, StepTotals]]) -> None:
        """`steps`: pairs of mean rows and totals; at least one. Totals with about the same rows are combined."""
        together: list[tuple[float, StepTotals]] = []  # rows, summed over the steps
        for rows, some in sorted((one for one in steps if one[1].count), key=lambda one: one[0]):
            if together and rows < _ALIKE * together[-1][0] / together[-1][1].count:
                before, those = together.pop()
                together.append((before + rows * some.count, those + some))
            else:
                together.append((rows * some.count, some))
        self._rows = [rows / some.count for rows, some in together]
        self._seconds: list[float] = []
        for _, some in together:  # more rows never take less time: a smaller value is noise
            self._seconds.append(max(some.mean_seconds, self._seconds[-1] if self._seconds else 0.0))

    def at(self, rows: float) -> float:
        if len(self._rows) == 1 or rows <= self._rows[0]:
            return self._seconds[0]
        right = min(bisect.bisect_left(self._rows, rows), len(self._rows) - 1)
        left = right - 1
        slope = (self._seconds[right] - self._seconds[left]) / (self._rows[right] - self._rows[left])
        return self._seconds[left] + slope * (rows - self._rows[left])


@dataclass(frozen=True, slots=True)
class Workload:
    """Load on the cluster."""

    num_streams: int  # streams on each target
    temperature: float
    num_speculative_tokens: int | None  # None: the controller decides


@dataclass(frozen=True, slots=True)
class Measured:
    """A load and its measurements."""

    workload: Workload
    counts: Counts

    @property
    def has_reached_its_depth(self) -> bool:
        return self.counts.mean_depth >= _REACHED_SHARE * (self.workload.num_speculative_tokens or 0)


@dataclass(frozen=True, slots=True)
class WorkerThreads:
    """Compute threads of a worker, and the cores that it may use."""

    pool: str  # target or draft
    worker: str  # pool and address of the worker
    num_threads: int
    num_cores: int  # 0: unknown

    @property
    def are_oversubscribed(self) -> bool:
        return self.num_threads > self.num_cores > 0


@dataclass(frozen=True, slots=True)
class Examination:
    """All measurements of a cluster."""

    plain: Measured  # k = 0
    fixed: Sequence[Measured]  # loads of one depth each, at the same temperature
    alone: Measured  # load of one stream, with drafts
    auto: Measured
    temperatures: Sequence[Measured]  # loads of one depth, at several temperatures
    max_depth: int = MAX_DEPTH  # depth that requests may ask for
    threads: Sequence[WorkerThreads] = ()  # threads of all workers

    @property
    def is_cache_full(self) -> bool:
        """True if sequences were preempted or waited for the target's blocks."""
        return self.auto.counts.num_preemptions > 0 or self.auto.counts.mean_waiting > 0.5

    @property
    def has_drafts(self) -> bool:
        """True if some step verified drafts under the loads that requested drafts."""
        return any(one.counts.num_rounds and one.counts.verify.count for one in self.fixed)

    @property
    def num_running(self) -> float:
        """Number of streams that hold blocks, or could hold them."""
        waiting = self.auto.counts.mean_waiting if self.is_cache_full else 0.0
        return self.auto.workload.num_streams - waiting

    @property
    def reached(self) -> Sequence[Measured]:
        """Measurements at the fixed depths that were reached; all fixed depths if none was reached.

        If drafts are late, rounds have fewer drafts than requested.
        """
        return [one for one in self.fixed if one.has_reached_its_depth] or self.fixed

    @property
    def fastest(self) -> Measured:
        """The fastest of the `reached` measurements."""
        return max(self.reached, key=lambda one: one.counts.tokens_per_second)

    @property
    def network_seconds(self) -> float:
        """Seconds between a request for drafts and their arrival with one stream, minus the drafting time.

        The links' own round trip is not used: if the drafter ran ahead, it answers at once, and the shortest round trip
        is not typical.
        """
        alone = self.alone.counts
        return max(0.0, alone.wait_a_step - alone.mean_depth * alone.draft.mean_seconds)

    @property
    def survival(self) -> tuple[float, ...]:
        """For depths 1, 2, ...: share of committed drafts, measured with the smallest k that includes the depth."""
        found: list[float] = []
        for one in sorted(self.fixed, key=lambda one: one.workload.num_speculative_tokens or 0):
            if one.has_reached_its_depth or not found:
                found += one.counts.survival[len(found) : one.workload.num_speculative_tokens]
        return tuple(found)
