"""Predicts the time that a client waits, in the median and at p99, with a model of the step loop.

1. A step takes the time of a round plus the time that the rows of its prompts add. Prompts come at random, so their
   number in a step has a Poisson distribution.
2. The first token takes the rest of the running step, and the step of its own prompt. A request is more likely to
   arrive in a longer step. Prompts that arrive during the same running step share the next step; prompt tokens beyond
   the step's budget take further steps. (With one sequence there is no wait.)
3. The other tokens take a random number of rounds (`cluster.speculation.answer_time`).

The model ignores requests that queue for memory or come faster than they are answered; `prediction` reports these
cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cluster.speculation import answer_time

_PARTS = 40  # parts of the remaining step time


@dataclass(frozen=True, slots=True)
class Latency:
    """Latencies in seconds. Between tokens: time of an answer after its first token, per token after the first."""

    first_token: float  # median
    first_token_p99: float
    between_tokens: float  # median over answers
    between_tokens_p99: float
    pause_p99: float  # over all gaps between two tokens; the gap between tokens of one round is zero


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The steps at some load."""

    seconds: tuple[float, ...]  # step time by the number of prompts in it, from 0 to the maximum
    prompts_a_step: float  # mean
    is_alone: bool = False  # no other sequence runs when a request arrives

    @property
    def most_prompts(self) -> int:
        return len(self.seconds) - 1

    def lengths(self) -> list[tuple[float, float]]:
        """Returns pairs of a step's seconds and their probability, in ascending order.

        Steps with more than the maximum number of prompts count as full steps.
        """
        return [(self.seconds[min(n, self.most_prompts)], p) for n, p in _poisson(self.prompts_a_step)]

    @property
    def mean_seconds(self) -> float:
        return sum(seconds * probability for seconds, probability in self.lengths())

    @property
    def variance(self) -> float:
        mean = self.mean_seconds
        return sum((seconds - mean) ** 2 * probability for seconds, probability in self.lengths())


def mean_rounds(acceptance_rate: float, num_speculative_tokens: int, num_tokens: float) -> float:
    """Returns the mean number of rounds until `num_tokens` are committed. Surplus tokens of the last round are lost."""
    return answer_time.mean_rounds(*_moments(acceptance_rate, num_speculative_tokens), num_tokens)


def latency(load: StepLoad, acceptance_rate: float, num_speculative_tokens: int, answer_tokens: float) -> Latency:
    first = sorted(_first_token(load))
    moments = _moments(acceptance_rate, num_speculative_tokens)
    rest, step = max(answer_tokens - 1, 1.0), load.mean_seconds
    return Latency(
        first_token=_quantile(first, 0.5),
        first_token_p99=_quantile(first, 0.99),
        between_tokens=answer_time.mean_rounds(*moments, rest) * step / rest,
        between_tokens_p99=answer_time.seconds_per_token_p99(*moments, rest, step, load.variance),
        # One in E gaps between tokens is a step, the others are zero.
        pause_p99=_quantile(load.lengths(), max(0.0, 1 - 0.01 * moments[0])),
    )


def _moments(acceptance_rate: float, num_speculative_tokens: int) -> tuple[float, float]:
    return answer_time.token_moments([acceptance_rate**depth for depth in range(1, num_speculative_tokens + 1)])


def _first_token(load: StepLoad) -> Iterator[tuple[float, float]]:
    """Yields possible times to the first token in seconds, with their probabilities."""
    if load.is_alone:
        yield load.seconds[1], 1.0
        return
    mean, fit = load.mean_seconds, load.most_prompts
    for running, probability in load.lengths():
        coming = load.prompts_a_step * running / mean
        for num_others, others in _poisson(coming):
            full, rest = divmod(num_others, fit)
            own = full * load.seconds[fit] + load.seconds[1 + rest]
            for part in range(_PARTS):
                # A request is more likely to arrive in a longer step.
                yield (part + 0.5) / _PARTS * running + own, probability * running / mean * others / _PARTS


def _poisson(mean: float) -> Iterator[tuple[int, float]]:
    """Yields numbers and their probabilities; omits numbers more than about six deviations from the mean."""
    spread = 6.0 * math.sqrt(mean) + 10.0
    for n in range(max(0, math.floor(mean - spread)), math.ceil(mean + spread) + 1):
        yield n, math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) if mean > 0 else float(n == 0)


def _quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """Returns the quantile of ascending values with weights."""
    total, passed = sum(weight for _, weight in weighted), 0.0
    for value, weight in weighted:
        passed += weight
        if passed >= share * total:
            return value
    return weighted[-1][0]
