"""Clusters that follow the formula to the letter, measured without noise."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.diagnosis.measurements import Counts, Examination, Measured, StepTotals, WorkerThreads, Workload

_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class FormulaCluster:
    """Times in seconds. Steps take `decode_seconds`, and `row_seconds` for each row beyond one of a sequence."""

    acceptance: float = 0.8
    decode_seconds: float = 0.020
    row_seconds: float = 0.0
    draft_seconds: float = 0.0005
    first_draft_seconds: float = 0.0  # that a round's first draft step takes longer
    round_trip_seconds: float = 0.0005
    bookkeeping_seconds: float = 0.0  # between two steps
    idle_share: float = 0.0  # of the time, there is no work
    missed_steps: float = 0.0  # for each token of an answer, which its sequence is no part of
    num_streams: int = 4
    num_running: int = 4  # of the streams; others wait for blocks
    num_preemptions: int = 0
    num_threads: int = 2  # of the target, on 2 cores

    def measured(self, depth: int, *, is_auto: bool = False, temperature: float = 0.0, streams: int = 0) -> Measured:
        survival = tuple(self.acceptance**place for place in range(1, depth + 1))
        tokens = 1.0 + sum(survival)
        running = min(self.num_running, streams or self.num_streams) / (1.0 + self.missed_steps * tokens)
        step = self.decode_seconds + self.row_seconds * depth * running
        drafting = self.first_draft_seconds + depth * self.draft_seconds if depth else 0.0
        wait = drafting + self.round_trip_seconds if depth else 0.0
        busy_seconds = (1.0 - self.idle_share) * _SECONDS
        num_steps = busy_seconds / (step + wait + self.bookkeeping_seconds)
        rounds = num_steps * running if depth else 0.0
        steps = StepTotals(num_steps, num_steps * step)
        counts = Counts(
            seconds=_SECONDS,
            num_tokens=num_steps * running * tokens,
            num_rounds=rounds,
            num_draft_tokens=rounds * depth,
            num_accepted_tokens=rounds * (tokens - 1.0),
            accepted_by_position=tuple(rounds * share for share in survival),
            verify=steps if depth else StepTotals(),
            decode=StepTotals() if depth else steps,
            draft=StepTotals(num_steps * depth, num_steps * drafting),
            wait_seconds=num_steps * wait,
            busy_seconds=busy_seconds,
            num_preemptions=self.num_preemptions,
            waiting_seconds=_SECONDS * (self.num_streams - self.num_running),
        )
        workload = Workload(streams or self.num_streams, temperature, None if is_auto else depth)
        return Measured(workload, counts)

    @property
    def best_depth(self) -> int:
        return max(range(17), key=lambda depth: self.measured(depth).counts.tokens_per_second)

    @property
    def tokens_per_second(self) -> float:
        """At the best depth."""
        return self.measured(self.best_depth).counts.tokens_per_second

    def examine(self) -> Examination:
        return Examination(
            plain=self.measured(0),
            fixed=[self.measured(depth) for depth in (2, 5, 10)],
            alone=self.measured(5, streams=1),
            auto=self.measured(self.best_depth, is_auto=True),
            temperatures=[self.measured(5)],
            threads=[
                WorkerThreads("target", "target a:1", self.num_threads, 2),
                WorkerThreads("draft", "draft a:2", 2, 2),
            ],
        )
