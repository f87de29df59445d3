"""What prompts add to the steps: those that decode faster get more of them.

Sequences that end make room for others, so prompts come in proportion to the tokens that are committed, however fast
that is. A step that commits T tokens so has a Poisson number of prompts, rT/c on the average, with r prompt tokens for
each committed one and c in each prompt. Beside them rows are dear that are free without: what pays in steps without
prompts need not pay where there are many.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cluster.speculation.costs import LearnedCurve

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_DECAY = 0.99  # of what was counted, a step: about the last hundred count
_LEAST_ANSWER = (
    16  # tokens that an answer is taken to have at least: prompts come first, and would seem to be all there is
)


class PromptLoad:
    def __init__(self) -> None:
        self._num_prompt_tokens = 0.0
        self._num_prompts = 0.0
        self._num_committed = 0.0

    def observe(self, num_prompt_tokens: int, num_prompts: int, num_committed: int) -> None:
        """A step computed so many tokens of so many prompts, and committed so many."""
        self._num_prompt_tokens = _DECAY * self._num_prompt_tokens + num_prompt_tokens
        self._num_prompts = _DECAY * self._num_prompts + num_prompts
        self._num_committed = _DECAY * self._num_committed + num_committed

    @property
    def is_any(self) -> bool:
        return self._num_prompt_tokens >= 1.0 and self._num_committed >= 1.0

    def beside(self, tokens: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Of steps that commit `tokens`: the share that has prompts, and how many tokens of prompts these have."""
        num_committed = max(self._num_committed, _LEAST_ANSWER * self._num_prompts)
        mean = tokens * (self._num_prompt_tokens / num_committed)
        share = -np.expm1(-mean * (self._num_prompts / self._num_prompt_tokens))
        return share, mean / np.maximum(share, 1e-9)


class StepSeconds:
    """What steps take on the average, by their rows and the tokens they commit, and how many rows they may have."""

    def __init__(self, verify: LearnedCurve, prompts: PromptLoad, max_rows: int) -> None:
        self.verify = verify
        self._prompts = prompts
        self._max_rows = max_rows

    @property
    def is_known(self) -> bool:
        return self.verify.is_known

    def at(self, rows: FloatArray | IntArray, tokens: FloatArray) -> FloatArray:
        """Something must be known of steps."""
        without = self.verify.at(rows)
        if not self._prompts.is_any:
            return without
        share, num_prompt_tokens = self._prompts.beside(tokens)
        return without + share * (self.verify.at(rows + num_prompt_tokens) - without)

    def room_for_drafts(self, num_rows: int) -> int:
        """Draft tokens that a step of `num_rows` sequences has room for on the average: where there are prompts, the
        scheduler keeps half of what is left for them. More would be drafted for nothing, and leave none to some."""
        room = max(0, self._max_rows - num_rows)
        if not self._prompts.is_any:
            return room
        (share,), _ = self._prompts.beside(np.array([float(num_rows)]))
        return int(room * (1.0 - share / 2.0))
