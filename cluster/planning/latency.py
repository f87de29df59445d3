"""Predicts the time that a client waits, in the median and at p99, with a model of the step loop.

1. A step takes the time of a round plus the time that the rows of its prompts add. A step computes a limited number of
   prompts, or one part of a long prompt. Prompts come at random (Poisson), and those that a step has no room for wait
   for the next one. (The number that waits at the beginning of a step is a Markov chain.)
2. The first token takes the rest of the running step, the steps of the prompts ahead, and those of its own prompt. A
   request is more likely to arrive in a longer step. (With one sequence there is no wait.)
3. The other tokens take a random number of rounds (`cluster.speculation.answer_time`).

The model ignores requests that queue for memory or come faster than they are answered; `prediction` reports these
cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from cluster.speculation import answer_time
from cluster.speculation.speed import Acceptance, survivals

_PARTS = 40  # parts of the remaining step time
_MAX_LOAD = 0.97  # of the prompts that steps can compute: clients that wait for answers do not ask faster
_MAX_BACKLOG = 64  # prompts left by a step; more are not within any limit
_NEGLIGIBLE = 1e-6  # probability


@dataclass(frozen=True, slots=True)
class Latency:
    """Latencies in seconds. Between tokens: time of an answer after its first token, per token after the first."""

    first_token: float  # median
    first_token_p99: float
    between_tokens: float  # median over answers
    between_tokens_p99: float
    pause_p99: float  # over all gaps between two tokens; the gap between tokens of one round is zero


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """LatencyLimits of p99 in seconds; infinite: none."""

    first_token: float
    between_tokens: float

    def admit(self, found: Latency) -> bool:
        return found.first_token_p99 <= self.first_token and found.between_tokens_p99 <= self.between_tokens


@dataclass(frozen=True)
class StepLoad:
    """The steps at some load."""

    seconds: tuple[float, ...]  # step time by the number of prompts, or parts of prompts, in it, from 0 to the maximum
    prompts_a_step: float  # mean number that comes during a step
    is_alone: bool = False  # no other sequence runs when a request arrives
    steps_a_prompt: int = 1  # steps with a part of the same prompt; above 1, a step has one part at most
    num_seqs: int = 1 << 16  # clients: no more prompts can wait

    @property
    def most_prompts(self) -> int:
        return len(self.seconds) - 1

    @property
    def most_a_second(self) -> float:
        """Prompts per second if every step is full."""
        return self.most_prompts / (self.steps_a_prompt * self.seconds[-1])

    @cached_property
    def waiting(self) -> npt.NDArray[np.float64]:
        """Probabilities that 0, 1, ... prompts wait at the beginning of a step.

        If a prompt takes several steps, it is the beginning of the first of these.
        """
        most = self.most_prompts
        coming = _poisson(min(self.prompts_a_step * self.steps_a_prompt, _MAX_LOAD * most))
        if coming[most + 1 :].sum() < _NEGLIGIBLE:
            return coming
        size = len(coming) + _MAX_BACKLOG
        moves = np.zeros((size, size))  # [waiting, waiting at the next step]
        for number in range(size):
            left = max(0, number - most)
            moves[number, left : left + len(coming)] = coming[: size - left]
        moves /= moves.sum(axis=1, keepdims=True)
        # The stationary distribution w: w (moves - 1) = 0, where one equation is replaced by sum(w) = 1.
        equations = (moves - np.eye(size)).T
        equations[-1] = 1.0
        stationary = np.clip(np.linalg.solve(equations, np.eye(size)[-1]), 0.0, 1.0)[: self.num_seqs + 1]
        return np.asarray(stationary / stationary.sum())

    def lengths(self) -> list[tuple[float, float]]:
        """Returns pairs of a step's seconds and their probability, in ascending order."""
        full = self.waiting[self.most_prompts :].sum()
        shares = [*self.waiting[: self.most_prompts], full]
        return [(seconds, float(share)) for seconds, share in zip(self.seconds, shares, strict=False)]

    @cached_property
    def mean_seconds(self) -> float:
        return sum(seconds * probability for seconds, probability in self.lengths())

    @property
    def variance(self) -> float:
        """Variance of a step's seconds; of the sum of n steps it is n times as large.

        The steps of one long prompt follow each other, so they count as one in as many.
        """
        mean = self.mean_seconds
        return self.steps_a_prompt * sum((seconds - mean) ** 2 * probability for seconds, probability in self.lengths())

    def first_token(self) -> Iterator[tuple[float, float]]:
        """Yields possible times to the first token in seconds, with their probabilities."""
        if self.is_alone:
            yield self._until_first(0), 1.0
            return
        for num_waiting, probability in self._likely():
            running, left = self._running(num_waiting)
            for num_others, others in enumerate(_poisson(self._coming(running)).tolist()):
                own = self._until_first(left + num_others)
                # A request is more likely to arrive in a longer step.
                weight = probability * running * others / _PARTS
                for part in range(_PARTS if weight > _NEGLIGIBLE * running else 0):
                    yield (part + 0.5) / _PARTS * running + own, weight

    @property
    def mean_first_token(self) -> float:
        if self.is_alone:
            return self._until_first(0)
        total = weights = 0.0
        for num_waiting, probability in self._likely():
            running, left = self._running(num_waiting)
            weight = probability * running
            total += weight * (running / 2 + self._until_first(left + round(self._coming(running))))
            weights += weight
        return total / weights

    def _likely(self) -> Iterator[tuple[int, float]]:
        return ((number, share) for number, share in enumerate(self.waiting.tolist()) if share > _NEGLIGIBLE)

    def _running(self, num_waiting: int) -> tuple[float, int]:
        """Returns the seconds of the step, or of those of a long prompt, and the number of prompts that it leaves."""
        most = self.most_prompts
        seconds = self.seconds[min(num_waiting, most)] * (self.steps_a_prompt if num_waiting else 1)
        return seconds, max(0, num_waiting - most)

    def _coming(self, seconds: float) -> float:
        """Returns the mean number of prompts that come in `seconds`."""
        return self.prompts_a_step * seconds / self.mean_seconds

    def _until_first(self, num_ahead: int) -> float:
        full, rest = divmod(min(num_ahead, self.num_seqs - 1), self.most_prompts)
        return self.steps_a_prompt * (full * self.seconds[-1] + self.seconds[1 + rest])


def mean_rounds(acceptance: Acceptance, num_speculative_tokens: int, num_tokens: float) -> float:
    """Returns the mean number of rounds until `num_tokens` are committed. Surplus tokens of the last round are lost."""
    return answer_time.mean_rounds(*_moments(acceptance, num_speculative_tokens), num_tokens)


def latency(load: StepLoad, acceptance: Acceptance, num_speculative_tokens: int, answer_tokens: float) -> Latency:
    first = sorted(load.first_token())
    moments = _moments(acceptance, num_speculative_tokens)
    rest, step = max(answer_tokens - 1, 1.0), load.mean_seconds
    return Latency(
        first_token=_quantile(first, 0.5),
        first_token_p99=_quantile(first, 0.99),
        between_tokens=answer_time.mean_rounds(*moments, rest) * step / rest,
        between_tokens_p99=answer_time.seconds_per_token_p99(*moments, rest, step, load.variance),
        # One in E gaps between tokens is a step, the others are zero.
        pause_p99=_quantile(load.lengths(), max(0.0, 1 - 0.01 * moments[0])),
    )


def _moments(acceptance: Acceptance, num_speculative_tokens: int) -> tuple[float, float]:
    return answer_time.token_moments(survivals(acceptance, num_speculative_tokens)[1:])


def _poisson(mean: float) -> npt.NDArray[np.float64]:
    """Returns the probabilities of 0, 1, ... up to about six deviations above the mean."""
    numbers = np.arange(math.ceil(mean + 6.0 * math.sqrt(mean)) + 4)
    logs = numbers * math.log(mean) if mean > 0 else np.where(numbers, -np.inf, 0.0)
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(numbers[1:]))])
    return np.asarray(np.exp(logs - mean - log_factorials))


def _quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """Returns the quantile of ascending values with weights."""
    total, passed = sum(weight for _, weight in weighted), 0.0
    for value, weight in weighted:
        passed += weight
        if passed >= share * total:
            return value
    return weighted[-1][0]
