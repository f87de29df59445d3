"""How long a client waits, in the median and at p99: a model of a loop that steps, in three sentences.

1. A step takes the round's time, and longer by what the rows of the prompts in it add; prompts come at random, so
   their number in a step is Poisson.
2. The first token takes the rest of the running step, and the step of its own prompt. A request is more likely to
   arrive in a longer step. Prompts that came during the same running step share the next one; prompt tokens beyond
   the step's budget take further steps. (With one sequence there is no wait.)
3. The tokens after it take a random number of rounds: (n + overshoot) / E on average for n tokens. The last round's
   overshoot is (E[X^2] / E - 1) / 2 of its tokens X, the variance n * Var(X) / E^3 (renewal theory: Cox 1962). Their
   sum of steps is taken as normal.

It leaves out requests that queue for memory or come faster than they are answered; `prediction` reports these cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_Z99 = 2.3263478740408408  # 99th percentile of the normal distribution
_PARTS = 40  # parts of the remaining step time


@dataclass(frozen=True, slots=True)
class Latency:
    """Latencies in seconds. Between tokens: an answer's time after the first token, divided by the tokens after it."""

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
        """Returns the seconds of a step and their probabilities, in ascending order. The rest counts as a full step."""
        return [(self.seconds[min(n, self.most_prompts)], p) for n, p in _poisson(self.prompts_a_step)]

    @property
    def mean_seconds(self) -> float:
        return sum(seconds * probability for seconds, probability in self.lengths())

    @property
    def variance(self) -> float:
        mean = self.mean_seconds
        return sum((seconds - mean) ** 2 * probability for seconds, probability in self.lengths())


def token_moments(acceptance_rate: float, num_speculative_tokens: int) -> tuple[float, float]:
    """Returns mean and variance of the tokens per round: P(more than j) = a**j up to k.

    So E[X^2] = sum of (2j + 1) a**j.
    """
    survivals = [acceptance_rate**j for j in range(num_speculative_tokens + 1)]
    mean = sum(survivals)
    return mean, sum((2 * j + 1) * survival for j, survival in enumerate(survivals)) - mean**2


def mean_rounds(acceptance_rate: float, num_speculative_tokens: int, num_tokens: float) -> float:
    """Returns the mean rounds until `num_tokens` are committed; surplus tokens of the last round are lost."""
    mean, variance = token_moments(acceptance_rate, num_speculative_tokens)
    overshoot = ((variance + mean**2) / mean - 1) / 2
    return (num_tokens + overshoot) / mean


def latency(load: StepLoad, acceptance_rate: float, num_speculative_tokens: int, answer_tokens: float) -> Latency:
    first = sorted(_first_token(load))
    mean_tokens, variance = token_moments(acceptance_rate, num_speculative_tokens)
    rest = max(answer_tokens - 1, 1.0)
    rounds, step = mean_rounds(acceptance_rate, num_speculative_tokens, rest), load.mean_seconds
    deviation = math.sqrt(rounds * load.variance + rest * variance / mean_tokens**3 * step**2)
    return Latency(
        first_token=_quantile(first, 0.5),
        first_token_p99=_quantile(first, 0.99),
        between_tokens=rounds * step / rest,
        between_tokens_p99=(rounds * step + _Z99 * deviation) / rest,
        # One in E gaps between tokens is a step, the others are zero.
        pause_p99=_quantile(load.lengths(), max(0.0, 1 - 0.01 * mean_tokens)),
    )


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
                # A longer step is more likely to be met.
                yield (part + 0.5) / _PARTS * running + own, probability * running / mean * others / _PARTS


def _poisson(mean: float) -> Iterator[tuple[int, float]]:
    """Yields numbers and their probabilities, except for those more than six deviations from the mean."""
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
