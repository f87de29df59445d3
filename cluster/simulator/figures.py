"""Records steps and requests, and computes the figures of a run from the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cluster.targets.base import GenerationOutput

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles in seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: npt.NDArray[np.float64]) -> Percentiles | None:
        """Returns the percentiles of `values`; None if there are no values."""
        return cls(*np.percentile(values, PERCENTILES).tolist()) if values.size else None


@dataclass(frozen=True, slots=True)
class Interval:
    """Figures of one interval of the run."""

    seconds: float  # start of the run, in its own time
    tokens_per_second: float
    mean_k: float
    acceptance: float
    num_waiting: float  # unadmitted requests, summed over targets, mean over steps


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    name: str
    utilization: float  # share of the time that the worker computed
    tokens_per_second: float = 0.0  # throughput of a target
    wait_share: float = 0.0  # share of the time that a target waited for proposals
    mean_batch: float = 0.0  # sequences in a draft worker's step
    draft_shares: Mapping[str, float] = field(default_factory=dict)  # of a draft worker's steps, by work
    kv_used: float = 0.0  # highest share of a target's blocks
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of the time after the warm-up. Latencies cover answered requests that arrived after the warm-up."""

    seconds: float
    tokens_per_second: float
    requests_per_second: float
    num_requests: int
    num_finished: int
    num_refused: int
    first_token: Percentiles | None
    per_output_token: Percentiles | None
    latency: Percentiles | None
    mean_k: float  # draft tokens verified per round and sequence
    acceptance: float
    tokens_a_round: float
    rows_a_step: float
    num_steps: int
    targets: Sequence[WorkerFigures]
    drafts: Sequence[WorkerFigures]
    intervals: Sequence[Interval]
    dollars_per_hour: float | None = None
    dollars_per_million_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class StepFigures:
    """A target's step."""

    seconds: float
    wait_seconds: float  # wait for proposals before the step
    num_rows: int
    num_waiting: int  # requests without admission


@dataclass(slots=True)
class _Sums:
    num_tokens: int = 0
    num_rounds: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    num_rows: int = 0
    waiting: dict[int, tuple[int, int]] = field(default_factory=dict)  # by target: sum and number of steps

    def take(self, target: int, step: StepFigures, outputs: Sequence[GenerationOutput]) -> None:
        for output in outputs:
            self.num_tokens += len(output.token_ids)
            self.num_drafts += output.num_draft_tokens
            self.num_accepted += output.num_accepted_tokens
        self.num_rounds += len(outputs)
        self.num_steps += 1
        self.num_rows += step.num_rows
        waiting, steps = self.waiting.get(target, (0, 0))
        self.waiting[target] = waiting + step.num_waiting, steps + 1


@dataclass(slots=True)
class _Drafting:
    """Work of a draft worker between the warm-up and the end."""

    seconds: float = 0.0
    num_steps: int = 0
    num_sequences: int = 0


class Recorder:
    """Records steps and requests. `after_seconds`: time from the end of a step until a client has its tokens."""

    def __init__(
        self, num_targets: int, num_drafts: int, warm_up: float, until: float, interval: float, after_seconds: float
    ) -> None:
        self.arrived_at: list[float] = []
        self.answer_tokens: list[int] = []
        self.first_at: list[float] = []
        self.finished_at: list[float] = []
        self.is_refused: list[bool] = []
        self.num_steps = self.num_draft_steps = self.num_tokens = 0  # since the start
        self._target_tokens = [0] * num_targets
        self._warm_up, self._until, self._interval = warm_up, until, interval
        self._after = after_seconds
        self._all = _Sums()
        self._sums: dict[int, _Sums] = {}
        self._busy = np.zeros(num_targets)
        self._waited = np.zeros(num_targets)
        self._drafting = [_Drafting() for _ in range(num_drafts)]

    def arrived(self, now: float, answer_tokens: int) -> int:
        """Records an arrival. Returns the request's number."""
        self.arrived_at.append(now)
        self.answer_tokens.append(answer_tokens)
        self.first_at.append(np.nan)
        self.finished_at.append(np.nan)
        self.is_refused.append(False)
        return len(self.arrived_at) - 1

    def refused(self, number: int) -> None:
        self.is_refused[number] = True

    def committed(self, number: int, now: float, *, is_finished: bool) -> None:
        """Records that a step that ended at `now` committed tokens of request `number`."""
        if np.isnan(self.first_at[number]):
            self.first_at[number] = now + self._after
        if is_finished:
            self.finished_at[number] = now + self._after

    def stepped(self, target: int, now: float, step: StepFigures, outputs: Sequence[GenerationOutput]) -> None:
        num_tokens = sum(len(output.token_ids) for output in outputs)
        self.num_steps += 1
        self.num_tokens += num_tokens
        self._sums.setdefault(int(now / self._interval), _Sums()).take(target, step, outputs)
        if self._warm_up <= now <= self._until:
            self._all.take(target, step, outputs)
            self._target_tokens[target] += num_tokens
            self._busy[target] += step.seconds
            self._waited[target] += step.wait_seconds

    def drafted(self, draft: int, now: float, seconds: float, num_sequences: int) -> None:
        """Records a draft worker's step that took `seconds` and ended at `now`."""
        self.num_draft_steps += 1
        if self._warm_up <= now <= self._until:
            drafting = self._drafting[draft]
            drafting.seconds += seconds
            drafting.num_steps += 1
            drafting.num_sequences += num_sequences

    def seconds(self, ended_at: float) -> float:
        """Returns the seconds between the warm-up and the end of the run."""
        return max(min(self._until, ended_at) - self._warm_up, 1e-9)

    def figures(
        self,
        ended_at: float,
        targets: Sequence[WorkerFigures],
        dollars_per_hour: float | None,
        works: Sequence[Mapping[str, float]] = (),
    ) -> Figures:
        """Returns the figures. `targets` report the use of KV blocks and the preemptions.

        `works`: seconds of each draft worker's steps by work, in the whole run.
        """
        seconds = self.seconds(ended_at)
        arrived, first, finished = (np.array(times) for times in (self.arrived_at, self.first_at, self.finished_at))
        answers = np.array(self.answer_tokens)
        counts = (arrived >= self._warm_up) & ~np.isnan(finished)
        several = counts & (answers > 1)
        total = self._all
        tokens_per_second = total.num_tokens / seconds
        dollars = None
        if dollars_per_hour is not None and tokens_per_second > 0:
            dollars = dollars_per_hour / 3600 / tokens_per_second * 1e6
        in_time = (finished >= self._warm_up) & (finished <= self._until)
        return Figures(
            seconds=seconds,
            tokens_per_second=tokens_per_second,
            requests_per_second=int(in_time.sum()) / seconds,
            num_requests=len(arrived),
            num_finished=int((~np.isnan(finished)).sum()),
            num_refused=sum(self.is_refused),
            first_token=Percentiles.of(first[counts] - arrived[counts]),
            per_output_token=Percentiles.of((finished[several] - first[several]) / (answers[several] - 1)),
            latency=Percentiles.of(finished[counts] - arrived[counts]),
            mean_k=total.num_drafts / max(total.num_rounds, 1),
            acceptance=total.num_accepted / max(total.num_drafts, 1),
            tokens_a_round=total.num_tokens / max(total.num_rounds, 1),
            rows_a_step=total.num_rows / max(total.num_steps, 1),
            num_steps=total.num_steps,
            targets=[
                WorkerFigures(
                    one.name,
                    float(busy) / seconds,
                    tokens / seconds,
                    float(waited) / seconds,
                    kv_used=one.kv_used,
                    num_preemptions=one.num_preemptions,
                )
                for one, busy, waited, tokens in zip(
                    targets, self._busy, self._waited, self._target_tokens, strict=True
                )
            ],
            drafts=[
                WorkerFigures(
                    f"draft {index}",
                    drafting.seconds / seconds,
                    mean_batch=drafting.num_sequences / max(drafting.num_steps, 1),
                    draft_shares={work: spent / max(sum(own.values()), 1e-9) for work, spent in own.items()},
                )
                for index, (drafting, own) in enumerate(
                    zip(self._drafting, works or [{}] * len(self._drafting), strict=True)
                )
            ],
            intervals=[self._interval_of(number, sums, ended_at) for number, sums in sorted(self._sums.items())],
            dollars_per_hour=dollars_per_hour,
            dollars_per_million_tokens=dollars,
        )

    def _interval_of(self, number: int, sums: _Sums, ended_at: float) -> Interval:
        start = number * self._interval
        is_cut = ended_at <= self._until < start + self._interval  # no step was observed after `ended_at`
        waiting = sum(total / steps for total, steps in sums.waiting.values())
        return Interval(
            start,
            sums.num_tokens / (self._until - start if is_cut else self._interval),
            sums.num_drafts / max(sums.num_rounds, 1),
            sums.num_accepted / max(sums.num_drafts, 1),
            waiting,
        )
