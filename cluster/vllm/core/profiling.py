"""Measures vLLM's steps before the first request, so that the depth controller need not guess their duration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm.v1.request import Request

from cluster.speculation.tuning import TRIAL_DEPTHS, TRIAL_REPEATS
from cluster.vllm.core.scheduler import EngineStep, Rounds

STEPS = TRIAL_REPEATS * len(TRIAL_DEPTHS)


class ProfilingRounds(Rounds):
    """Rounds that supply drafts of each depth in `TRIAL_DEPTHS`, and measure the steps.

    The drafts repeat one token and are nearly always wrong. Only their number matters.
    """

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._num_planned = self._depth = 0
        self._seconds: dict[int, float] = {}

    @property
    def step_times(self) -> list[tuple[int, float]]:
        """Pairs of rows and seconds: for each number of rows, the shortest step."""
        return sorted(self._seconds.items())

    def plan(self, decoding: Sequence[Request], joining: Sequence[Request]) -> Mapping[str, int]:
        self._depth = min(TRIAL_DEPTHS[self._num_planned % len(TRIAL_DEPTHS)], self._max_depth)
        self._num_planned += bool(decoding)
        return dict.fromkeys([request.request_id for request in decoding], self._depth)

    def collect(self, decoding: Sequence[Request]) -> Mapping[str, Sequence[int]]:
        return {request.request_id: [0] * self._depth for request in decoding}

    def end(self, step: EngineStep) -> None:
        if step.rounds and not step.prompts:
            self._seconds[step.num_rows] = min(step.seconds, self._seconds.get(step.num_rows, step.seconds))
