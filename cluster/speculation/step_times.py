"""Predicts seconds and tokens per second of the target's steps, prompts included.

Sequences that end make room for others, so the number of prompt tokens is proportional to the number of committed
tokens, at any speed. A step that commits T tokens causes

    demand(T) = T * (sequences ended / tokens committed) * (prompt tokens computed / sequences joined)

prompt tokens. The formula uses the sequences that ended, not those that joined, because the prompts of a growing load
come before its answers. Steps with prompt tokens have c of them on average, so the share of such steps is demand / c.
If this share would exceed 1, each step has more than c prompt tokens, up to the scheduler's limit
(`cluster.engine.prompt_pace`). Beyond that limit sequences wait for their prompts, and T tokens take several steps,
with the same number of rows in total.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cluster.speculation.learned_curve import LearnedCurve
from cluster.speculation.tuning import KEEP, WINDOW

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class StepTimes:
    """Predicts the duration of a target's steps from rows and committed tokens, and the room for drafts in them."""

    def __init__(self, max_rows: int) -> None:
        self.curve = LearnedCurve(max_rows)  # seconds by all rows of a step, including those of prompts
        self._max_rows = max_rows
        self._num_prompt_tokens = 0.0
        self._num_joined = 0.0
        self._num_ended = 0.0
        self._num_committed = 0.0
        self._num_steps = 0.0
        self._num_steps_with_prompts = 0.0
        self._most_prompt_tokens = np.inf  # limit of prompt tokens per step; infinite until a step defers some

    @property
    def is_known(self) -> bool:
        return self.curve.is_known

    def joined(self) -> None:
        """Counts a sequence whose prompt is about to be computed."""
        self._num_joined += 1.0

    def ended(self) -> None:
        """Counts a sequence that ended and made room for another."""
        self._num_ended += 1.0

    def observe_rows(self, num_rows: int, num_prompt_tokens: int, longest_context: int, seconds: float) -> None:
        """Learns from a step with `num_rows` choices and `num_prompt_tokens` prompt tokens.

        Steps with prompts are included, because under constant churn almost every step has prompts. Steps without a
        choice are excluded, and so are steps with late chunks of long prompts. `longest_context`: maximum number of
        tokens before a chunk.
        """
        if num_rows and longest_context <= self._max_rows:
            self.curve.observe(num_rows + num_prompt_tokens, seconds)

    def observe_prompts(self, num_prompt_tokens: int, num_committed: int, *, left_some: bool = False) -> None:
        """Counts a step that computed `num_prompt_tokens`.

        `left_some`: the step left part of the prompts to the next one.
        """
        if left_some and num_prompt_tokens:
            known = self._most_prompt_tokens if np.isfinite(self._most_prompt_tokens) else num_prompt_tokens
            self._most_prompt_tokens = known + (num_prompt_tokens - known) / WINDOW
        else:
            self._most_prompt_tokens = max(self._most_prompt_tokens, num_prompt_tokens)
        self._num_prompt_tokens = KEEP * self._num_prompt_tokens + num_prompt_tokens
        self._num_joined *= KEEP
        self._num_ended *= KEEP
        self._num_committed = KEEP * self._num_committed + num_committed
        self._num_steps = KEEP * self._num_steps + 1.0
        self._num_steps_with_prompts = KEEP * self._num_steps_with_prompts + (num_prompt_tokens > 0)

    def leave_prompts_waiting(self, tokens: float) -> bool:
        """Returns True if steps that commit `tokens` cause more prompt tokens than they can compute."""
        return self._has_seen_prompts and float(self._demand(tokens)) > self._most_prompt_tokens

    def seconds(self, rows: FloatArray | IntArray, tokens: FloatArray, wait_seconds: FloatArray | float) -> FloatArray:
        """Returns the mean seconds in which steps of `rows` rows commit `tokens`.

        Each step follows a wait of `wait_seconds` for proposals. Includes the time for the prompt tokens that these
        tokens cause. Requires a known step time.
        """
        num_steps, mean, _ = self._steps_of(rows, tokens)
        return np.asarray(num_steps * (mean + wait_seconds), np.float64)

    def step_moments(self, rows: FloatArray, tokens: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Returns mean and variance of the seconds of a step, without its wait.

        The arguments are those of `seconds`, but sequences that wait for their prompts do not count as waiting steps.
        The variance is that between steps with prompts and steps without. A long prompt takes several steps in a row,
        so these count as one larger step.
        """
        _, mean, variance = self._steps_of(rows, tokens)
        return mean, variance

    def _steps_of(
        self, rows: FloatArray | IntArray, tokens: FloatArray | IntArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Returns the number of steps in which `rows` rows commit `tokens`, and mean and variance of their seconds."""
        if not self._has_seen_prompts:
            return np.ones(np.shape(rows)), self.curve.at(rows), np.zeros(np.shape(rows))
        demand = self._demand(tokens)
        num_steps = np.maximum(1.0, demand / self._most_prompt_tokens)
        num_with_prompts = np.clip(
            demand, self._num_prompt_tokens / self._num_steps_with_prompts, self._most_prompt_tokens
        )
        share = np.minimum(1.0, demand / num_with_prompts)
        without = self.curve.at(rows / num_steps)
        added = self.curve.at(rows / num_steps + num_with_prompts) - without
        prompt_tokens = self._num_prompt_tokens / self._num_joined
        variance = share * (1.0 - share) * np.maximum(1.0, prompt_tokens / num_with_prompts) * added**2
        return num_steps, without + share * added, variance

    @property
    def _has_seen_prompts(self) -> bool:
        """False, too, when they have faded."""
        seen = self._num_prompt_tokens, self._num_joined, self._num_ended, self._num_committed
        return min(seen) >= 1.0 / WINDOW

    def _demand(self, tokens: FloatArray | IntArray | float) -> FloatArray:
        """Returns the prompt tokens that steps which commit `tokens` cause."""
        prompt_tokens = self._num_prompt_tokens / self._num_joined
        return np.asarray(tokens * (self._num_ended / self._num_committed) * prompt_tokens, np.float64)

    def room_for_drafts(self, num_rows: int) -> int:
        """Returns the mean number of draft tokens that a step of `num_rows` sequences has room for.

        In steps with prompts, drafts get at most half of the remaining room. With more drafts than fit, some sequences
        would get none.
        """
        share = self._num_steps_with_prompts / max(self._num_steps, 1.0)
        return int(max(0, self._max_rows - num_rows) * (1.0 - share / 2.0))
