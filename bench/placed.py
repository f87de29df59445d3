"""Runs an option of the planner as a cluster in virtual time.

Steps take the times that the planner predicts, by measured kernels where there are some. Scheduler, rounds, draft
workers and prefix cache are the real ones (`cluster.simulator`), and programs take the time that was measured for them.
Clients send their next request when they have their answer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.in_process import SIMULATED
from cluster.config import Config
from cluster.config.file import load_config
from cluster.planning.kernels import Segments
from cluster.planning.latency import LatencyLimits
from cluster.planning.prediction import ExpectedLoad, Option, plan
from cluster.planning.steps import NoSteps, context_ms, curve_points
from cluster.simulator.cluster import MeasuredSpan, SimulatedCluster
from cluster.simulator.drafts import VOCAB_SIZE
from cluster.simulator.traffic import Arrival, ClosedTraffic, EndedRequest, Lengths

_WARM_UP_SHARE = 0.3  # of the run, before what is measured
_NUM_BLOCKS = 200_000  # more than any run needs
_MAX_DEPTH = 8  # drafts of a sequence for which the target's curve has verify steps, if the controller chooses
_DRAFT_ROWS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
_TILE = 64  # rows: measured times of products jump after multiples of it
_PROMPT_ROWS = (64, 128, 192, 256, 320, 384, 448, 512, 1024, 2048)
_MARGIN = 1.2  # runs are so much longer than the planned rate needs


@dataclass(frozen=True, slots=True)
class SimulatedPoint:
    """Figures of one target with `num_clients`. Times are in seconds."""

    num_clients: int
    num_answers: int
    mean_k: float
    requests_per_second: float
    first_token_p99: float
    between_tokens_p99: float

    def excess(self, limits: LatencyLimits) -> float:
        """Returns the largest ratio of a time to its limit."""
        return max(self.first_token_p99 / limits.first_token, self.between_tokens_p99 / limits.between_tokens)


@dataclass(frozen=True, slots=True)
class Placed:
    option: Option
    load: ExpectedLoad
    fixed_k: int | None = None  # None: the controller chooses
    more: tuple[str, ...] = ()  # settings

    @property
    def config(self) -> Config:
        load, drafting = self.load, self.option.drafting
        settings: dict[str, object] = {
            "simulation.target_step_ms": self._target_curve(),
            "target.max_num_seqs": 2 * load.num_seqs,
            "target.max_num_batched_tokens": load.max_num_batched_tokens,
            "target.enable_prefix_caching": str(load.cached_tokens > 0).lower(),
            "draft.max_num_seqs": 2 * load.num_seqs,
            "draft.max_num_batched_tokens": load.max_num_batched_tokens,
        }
        if drafting is None or self.fixed_k == 0:
            settings |= {"speculation.num_speculative_tokens": 0, "draft.replicas": 0}
        else:
            acceptance = drafting.acceptance
            settings |= {
                "simulation.acceptance": list(acceptance) if isinstance(acceptance, tuple) else acceptance,
                "simulation.round_trip_ms": 1e3 * drafting.round_trip_seconds,
                "simulation.is_one_pass": str(drafting.is_one_pass).lower(),
                "simulation.draft_step_ms": [[1, 0.0]],
            }
            if not isinstance(drafting.steps, NoSteps):
                points = curve_points(drafting.steps, load.num_seqs, 0, _DRAFT_ROWS)
                settings["simulation.draft_step_ms"] = [list(point) for point in points]
                settings["simulation.draft_context_ms"] = list(context_ms(drafting.steps, load.num_seqs))
            if drafting.runs_ahead:
                settings["draft.context_tokens"] = "auto"
            else:
                settings |= {"draft.placement": "in-process", "draft.in_process_threads": "shared"}
            if self.fixed_k is not None:
                settings |= {"speculation.controller": "fixed", "speculation.num_speculative_tokens": self.fixed_k}
        return load_config(None, [*SIMULATED, *(f"{key}={value}" for key, value in settings.items()), *self.more])

    def _target_curve(self) -> list[list[float]]:
        """Returns rows and milliseconds of the target's steps: first those of verification, then those with prompts.

        A step with fewer rows than clients has fewer sequences, and one with more has more rows of each.
        """
        load, most_rows = self.load, (_MAX_DEPTH if self.fixed_k is None else self.fixed_k) + 1
        num_seqs, steps = load.num_seqs, self.option.target
        most = most_rows * num_seqs
        numbers = {1, *range(num_seqs, most + 1, num_seqs), *range(_TILE, most, _TILE), *range(_TILE + 1, most, _TILE)}
        points = [
            [rows, steps.seconds((Segments(min(rows, num_seqs), max(1.0, rows / num_seqs), load.mean_context),))]
            for rows in sorted(numbers)
        ]
        past = num_seqs % _TILE  # rows after the last jump
        for rows in sorted({n - back for n in _PROMPT_ROWS for back in (0, past, past - 1) if n > back}):
            before = load.cached_tokens + max(0, load.computed_tokens - rows) / 2
            prompts = Segments(max(1.0, rows / load.computed_tokens), min(rows, load.computed_tokens), before, 1)
            seconds = steps.seconds((Segments(num_seqs, 1, load.mean_context), prompts))
            if rows + num_seqs > points[-1][0]:
                points.append([rows + num_seqs, max(seconds, points[-1][1])])
        return [[rows, 1e3 * seconds] for rows, seconds in points]

    def run(self, num_answers: int, seed: int = 0) -> SimulatedPoint:
        """Runs until at least `num_answers` are measured."""
        planned = plan(replace(self.option, num_speculative_tokens=self.fixed_k), self.load)
        seconds = _MARGIN * num_answers * self.load.answer_tokens / planned.tokens_per_second
        while True:
            point = self._ran(seconds, seed)
            if point.num_answers >= num_answers:
                return point
            seconds *= _MARGIN * num_answers / max(point.num_answers, 1)

    def _ran(self, seconds: float, seed: int) -> SimulatedPoint:
        load, warm_up = self.load, _WARM_UP_SHARE * seconds
        answers = Lengths(max(2, load.answer_tokens // 2), load.answer_tokens * 3 // 2)
        prompts = Lengths(load.prompt_tokens, load.prompt_tokens)
        traffic = ClosedTraffic(load.num_seqs, warm_up + seconds, prompts, answers, seed, warm_up / 2)
        span = MeasuredSpan(warm_up, warm_up + seconds, is_cut=True)
        cluster = SimulatedCluster(self.config, _WithPrefix(traffic, load.cached_tokens), _NUM_BLOCKS, span, seed)
        cluster.run()
        figures = cluster.figures()
        first, between = figures.first_token, figures.per_output_token
        return SimulatedPoint(
            load.num_seqs,
            round(figures.requests_per_second * figures.seconds),
            figures.mean_k,
            figures.requests_per_second,
            math.inf if first is None else first.p99,
            math.inf if between is None else between.p99,
        )


class _WithPrefix:
    """Traffic whose prompts begin with the same `num_tokens` tokens."""

    def __init__(self, traffic: ClosedTraffic, num_tokens: int) -> None:
        self._traffic = traffic
        self._rng = np.random.default_rng(0)
        self._prefix = self._tokens(num_tokens)

    def arrivals(self) -> Iterator[Arrival]:
        return map(self._prefixed, self._traffic.arrivals())

    def after(self, answer: EndedRequest) -> Arrival | None:
        arrival = self._traffic.after(answer)
        return None if arrival is None else self._prefixed(arrival)

    def _prefixed(self, arrival: Arrival) -> Arrival:
        if not self._prefix:
            return arrival
        return replace(arrival, token_ids=[*self._prefix, *self._tokens(arrival.prompt_tokens - len(self._prefix))])

    def _tokens(self, number: int) -> list[int]:
        return [int(token) for token in self._rng.integers(VOCAB_SIZE, size=number)]


@dataclass(frozen=True, slots=True)
class WithinLimits:
    """The most clients and requests within limits, interpolated between points."""

    num_clients: float
    requests_per_second: float
    is_at_least: bool  # all points are within the limits


def within(points: Sequence[SimulatedPoint], limits: LatencyLimits) -> WithinLimits:
    """Returns nothing, 0 clients, if the first point already exceeds the limits. `points`: ascending in clients."""
    if points[0].excess(limits) > 1:
        return WithinLimits(0.0, 0.0, is_at_least=False)
    for left, right in itertools.pairwise(points):
        low, high = left.excess(limits), right.excess(limits)
        if high > 1:
            share = (1 - low) / (high - low)
            return WithinLimits(
                left.num_clients + share * (right.num_clients - left.num_clients),
                left.requests_per_second + share * (right.requests_per_second - left.requests_per_second),
                is_at_least=False,
            )
    return WithinLimits(float(points[-1].num_clients), points[-1].requests_per_second, is_at_least=True)
