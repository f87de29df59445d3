"""Committed tokens a second of a step whose sequences are all drafted for alike: what draft workers are compared by.

A step of n sequences with k drafts each commits n (1 + s_1 + ... + s_k) tokens in verify(n (1 + k)) + wait(k), where
s_j is the probability that a draft so deep is committed. The controller reckons by the same measures, for each sequence
apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.speculation.prompts import StepSeconds

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Of the target; `num_rows` are those of the step without drafts."""

    steps: StepSeconds
    num_rows: int
    max_wait_seconds: float

    @property
    def plain_rate(self) -> float:
        """Tokens a second of one sequence without drafts. Something must be known."""
        return 1.0 / self.seconds(0, float(self.num_rows))

    def seconds(self, num_drafts: int, num_tokens: float) -> float:
        """Of a step with so many drafts in all, which commits so many tokens, its wait apart."""
        return max(float(self.steps.at(np.array([self.num_rows + num_drafts]), np.array([num_tokens]))[0]), 1e-9)

    def rates(self, survival: FloatArray, wait_seconds: FloatArray) -> FloatArray:
        """Tokens a second of one sequence, by depth from 1 on; 0 where no step waits so long, or has so many rows.

        The last axis of `wait_seconds` is the depth; others are alternatives.

        Before any step's time is known it is left out: what remains compares draft workers all the same.
        """
        depths = np.arange(1, len(survival) + 1)
        tokens = 1.0 + np.cumsum(survival)
        rows = self.num_rows * (1 + depths)
        steps = self.steps.at(rows, self.num_rows * tokens) if self.steps.is_known else np.zeros(len(depths))
        seconds = np.maximum(steps + self.steps.num_steps(self.num_rows * tokens) * wait_seconds, 1e-9)
        fits = (wait_seconds <= self.max_wait_seconds) & (
            rows - self.num_rows <= self.steps.room_for_drafts(self.num_rows)
        )
        return np.where(fits, tokens / seconds, 0.0)
