"""What prompts add to the steps: those that decode faster get more of them.

Sequences that end make room for others, so prompts come in proportion to the tokens that are committed, however fast
that is. A step that commits T tokens so ends eT/n sequences, where e have ended while n tokens were committed, and has
a Poisson number of prompts, rT/c on the average, with r prompt tokens for each committed one and c in each prompt.
Beside them rows are dear that are free without: what pays in steps without prompts need not pay where there are many.

A step computes no more than so many tokens of prompts (`cluster.engine.prompt_pace`). Where T tokens bring f times as
many along, sequences wait for their prompts until a step commits T/f: these T take f steps, of as many rows in all.

The ends are what is counted, as the prompts of a load that grows come before its answers: by these, answers would seem
to be short for hundreds of steps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cluster.speculation.costs import LearnedCurve

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# Tokens before a chunk of a prompt, up to which what it takes is a matter of its rows and not of attention.
_SHORT_CONTEXT = 1024
_LEAST_SEEN = 0.01  # of what fades
_DECAY = 0.99  # of what was counted, a step: about the last hundred count
_LIMIT_RATE = 0.05  # of a step that had as many tokens of prompts as it may have


def learn_step(
    curve: LearnedCurve, num_rows: int, num_prompt_tokens: int, longest_context: int, seconds: float
) -> None:
    """A step of `num_rows` choices and so many tokens of prompts took `seconds`; no chunk of these had more than
    `longest_context` tokens before it.

    Steps with prompts teach too: where answers end all the time hardly a step is without. But not those of which
    nothing decoded, or whose prompts are long: what these take is attention, which is no matter of rows.
    """
    if num_rows and longest_context <= _SHORT_CONTEXT:
        curve.observe(num_rows + num_prompt_tokens, seconds)


class PromptLoad:
    def __init__(self) -> None:
        self._num_prompt_tokens = 0.0
        self._num_prompts = 0.0  # or parts of them, which steps computed
        self._num_joined = 0.0
        self._num_ended = 0.0
        self._num_committed = 0.0
        self._num_steps = 0.0
        self._num_steps_with_prompts = 0.0
        self._most_tokens: float | None = None  # None: no step left any

    def joined(self) -> None:
        """A sequence came, whose prompt is to be computed."""
        self._num_joined += 1.0

    def ended(self) -> None:
        """A sequence left, and makes room for another."""
        self._num_ended += 1.0

    def observe(self, num_prompt_tokens: int, num_prompts: int, num_committed: int, *, left_some: bool = False) -> None:
        """A step computed so many tokens of so many prompts, and committed so many; it `left_some` of the prompts."""
        if left_some and num_prompt_tokens:
            known = self._most_tokens or num_prompt_tokens
            self._most_tokens = known + _LIMIT_RATE * (num_prompt_tokens - known)
        elif self._most_tokens is not None:
            self._most_tokens = max(self._most_tokens, num_prompt_tokens)
        self._num_prompt_tokens = _DECAY * self._num_prompt_tokens + num_prompt_tokens
        self._num_prompts = _DECAY * self._num_prompts + num_prompts
        self._num_joined *= _DECAY
        self._num_ended *= _DECAY
        self._num_committed = _DECAY * self._num_committed + num_committed
        self._num_steps = _DECAY * self._num_steps + 1.0
        self._num_steps_with_prompts = _DECAY * self._num_steps_with_prompts + bool(num_prompts)

    @property
    def is_any(self) -> bool:
        seen = self._num_prompt_tokens, self._num_joined, self._num_ended, self._num_committed
        return min(seen) > _LEAST_SEEN

    @property
    def share(self) -> float:
        """Of the last steps, those that had prompts."""
        return self._num_steps_with_prompts / max(self._num_steps, 1.0)

    @property
    def most_tokens(self) -> float:
        """Of prompts, that a step computes when there are more."""
        return self._most_tokens or np.inf

    def beside(self, tokens: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Of steps that commit `tokens`: the share that will have prompts, and how many tokens of prompts these."""
        ends = tokens * (self._num_ended / self._num_committed)
        mean = ends * (self._num_prompt_tokens / self._num_joined)
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
        """Of all the steps that so many tokens take. Something must be known of steps."""
        if not self._prompts.is_any:
            return self.verify.at(rows)
        share, num_prompt_tokens = self._prompts.beside(tokens)
        mean, num_steps = share * num_prompt_tokens, self.num_steps(tokens)
        num_prompt_tokens = np.minimum(num_prompt_tokens, self._prompts.most_tokens)
        share = np.minimum(1.0, mean / np.maximum(num_prompt_tokens, 1e-9))
        without = self.verify.at(rows / num_steps)
        beside = self.verify.at(rows / num_steps + num_prompt_tokens)
        return np.asarray(num_steps * (without + share * (beside - without)), np.float64)

    def num_steps(self, tokens: FloatArray) -> FloatArray | float:
        """That so many tokens take, each with a wait for proposals: more than one where they bring more of prompts than
        a step computes."""
        if not self._prompts.is_any:
            return 1.0
        share, num_prompt_tokens = self._prompts.beside(tokens)
        return np.maximum(1.0, share * num_prompt_tokens / self._prompts.most_tokens)

    def room_for_drafts(self, num_rows: int) -> int:
        """Draft tokens that a step of `num_rows` sequences has room for on the average: where there are prompts, the
        scheduler keeps half of what is left for them. More would be drafted for nothing, and leave none to some."""
        return int(max(0, self._max_rows - num_rows) * (1.0 - self._prompts.share / 2.0))
