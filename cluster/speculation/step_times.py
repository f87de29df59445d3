"""Predicts seconds and tokens per second of the target's steps, prompts included.

Sequences that end make room for others, so prompts come in proportion to the committed tokens, however fast these come.
A step that commits T tokens brings along

    demand(T) = T * (sequences ended / tokens committed) * (prompt tokens computed / sequences joined)

prompt tokens. Ends are counted and not beginnings, as the prompts of a growing load come before its answers. Steps with
a part of a prompt have c prompt tokens on average, so a share demand / c of the steps has some. Where that exceeds 1,
each step has more prompt tokens, up to the limit that the scheduler keeps (`cluster.engine.prompt_pace`); beyond it
sequences wait for their prompts, and T tokens take several steps, with as many rows in all.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cluster.speculation.costs import LearnedCurve

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# Chunks after at most this number of tokens: their time depends on rows, not on attention.
_SHORT_CONTEXT = 1024
_DECAY = 0.99  # decay of the counts per step: about the last hundred steps count
_LEAST_SEEN = 0.01  # a smaller count has faded
_LIMIT_RATE = 0.05  # learning rate of the scheduler's prompt limit, per step that left prompt tokens over


class StepTimes:
    """Seconds of a target's steps by their rows and committed tokens, and the rows that a step has room for."""

    def __init__(self, max_rows: int) -> None:
        self.curve = LearnedCurve(max_rows)  # over all rows of the step, those of prompts included
        self._max_rows = max_rows
        self._num_prompt_tokens = 0.0
        self._num_joined = 0.0
        self._num_ended = 0.0
        self._num_committed = 0.0
        self._num_steps = 0.0
        self._num_steps_with_prompts = 0.0
        self._most_prompt_tokens = np.inf  # prompt tokens per step; infinite until a step leaves some over

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

        Steps with prompts are included, because under constant churn hardly any step is without. Steps in which nothing
        decoded are excluded, and those of long prompts: `longest_context` is the most tokens before a chunk.
        """
        if num_rows and longest_context <= _SHORT_CONTEXT:
            self.curve.observe(num_rows + num_prompt_tokens, seconds)

    def observe_prompts(self, num_prompt_tokens: int, num_committed: int, *, left_some: bool = False) -> None:
        """Counts a step that computed `num_prompt_tokens`.

        `left_some`: the step left part of the prompts to the next one.
        """
        if left_some and num_prompt_tokens:
            known = self._most_prompt_tokens if np.isfinite(self._most_prompt_tokens) else num_prompt_tokens
            self._most_prompt_tokens = known + _LIMIT_RATE * (num_prompt_tokens - known)
        else:
            self._most_prompt_tokens = max(self._most_prompt_tokens, num_prompt_tokens)
        self._num_prompt_tokens = _DECAY * self._num_prompt_tokens + num_prompt_tokens
        self._num_joined *= _DECAY
        self._num_ended *= _DECAY
        self._num_committed = _DECAY * self._num_committed + num_committed
        self._num_steps = _DECAY * self._num_steps + 1.0
        self._num_steps_with_prompts = _DECAY * self._num_steps_with_prompts + (num_prompt_tokens > 0)

    def seconds(self, rows: FloatArray | IntArray, tokens: FloatArray, wait_seconds: FloatArray | float) -> FloatArray:
        """Returns the mean seconds in which steps of `rows` rows commit `tokens`.

        Each step follows `wait_seconds` of waiting for proposals. Includes the prompts that come with these tokens.
        Requires a known step time.
        """
        seen = self._num_prompt_tokens, self._num_joined, self._num_ended, self._num_committed
        if min(seen) <= _LEAST_SEEN:
            return np.asarray(self.curve.at(rows) + wait_seconds, np.float64)
        demand = tokens * (self._num_ended / self._num_committed) * (self._num_prompt_tokens / self._num_joined)
        num_steps = np.maximum(1.0, demand / self._most_prompt_tokens)
        beside = np.clip(demand, self._num_prompt_tokens / self._num_steps_with_prompts, self._most_prompt_tokens)
        share = np.minimum(1.0, demand / beside)
        without = self.curve.at(rows / num_steps)
        with_prompts = self.curve.at(rows / num_steps + beside)
        return np.asarray(num_steps * (without + share * (with_prompts - without) + wait_seconds), np.float64)

    def room_for_drafts(self, num_rows: int) -> int:
        """Returns the mean number of draft tokens that a step of `num_rows` sequences has room for.

        With prompts, the scheduler keeps half of the remaining room for them; more drafts would leave none to some
        sequences.
        """
        share = self._num_steps_with_prompts / max(self._num_steps, 1.0)
        return int(max(0, self._max_rows - num_rows) * (1.0 - share / 2.0))
