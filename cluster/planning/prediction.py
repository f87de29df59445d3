"""Predicts throughput, latency, dollars and memory of each placement of a draft.

Throughput is that of a closed loop (Little 1961): S sequences run at all times. An answer takes the time to its first
token and the rounds of its other tokens, so there are S / (t_first + rounds * t_step) answers per second. The mean step
includes the rows of prompts, so prompts delay all running sequences. K is the depth with the most answers per second.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from cluster.engine.memory_plan import Budget
from cluster.engine.prompt_pace import ALONE_FACTOR
from cluster.errors import ConfigurationError
from cluster.planning.kernels import Segments
from cluster.planning.latency import Latency, LatencyLimits, StepLoad, latency, mean_rounds
from cluster.planning.overheads import PROGRAMS, Overheads
from cluster.planning.round_costs import MAX_DEPTH, Drafting, PredictedRound, plain_round, round_of
from cluster.planning.steps import StepPredictor
from cluster.speculation.speed import Acceptance

_ITERATIONS = 20  # iterations to a fixed point; a few are usually enough
_CONVERGED = 3e-3  # change from one iteration to the next, relative
WORSE_DEPTHS = 3  # after as many depths with fewer answers no more are tried


@dataclass(frozen=True, slots=True)
class ExpectedLoad:
    """The load that clients cause."""

    num_seqs: int  # concurrent sequences on one target
    prompt_tokens: int
    answer_tokens: int
    max_num_batched_tokens: int = 2048  # tokens of a step
    cached_tokens: int = 0  # tokens of a prompt in the target's prefix cache
    max_prefill_seconds: float | None = 0.05  # time that prompts may add to a step (`target.max_prefill_ms`)
    requests_per_second: float | None = None  # over all targets; None: `num_seqs` clients ask without pause

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens <= self.num_seqs:
            raise ConfigurationError(
                f"a step of {self.max_num_batched_tokens} tokens has no room for prompts in addition to "
                f"{self.num_seqs} sequences: raise the former or lower the latter"
            )

        if not 0 <= self.cached_tokens < self.prompt_tokens:
            raise ConfigurationError(
                f"{self.cached_tokens} cached tokens of a prompt of {self.prompt_tokens}: at least one is computed"
            )

    @property
    def longest(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def computed_tokens(self) -> int:
        """Tokens of a prompt that the target computes."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def mean_context(self) -> float:
        """Mean number of tokens in the cache of a decoding sequence, over its answer."""
        return self.prompt_tokens + self.answer_tokens / 2


@dataclass(frozen=True, slots=True)
class Option:
    """One way to place the draft."""

    name: str
    target: StepPredictor
    drafting: Drafting | None = None
    target_dollars_per_hour: float | None = None  # None: unknown
    draft_dollars_per_hour: float | None = None  # price of one draft device; None: the draft has no device of its own
    is_pool: bool = False  # whether a draft device serves several targets
    budgets: tuple[Budget, ...] = ()  # budgets of the target's memory, and of the draft device's if it has one
    num_speculative_tokens: int | None = None  # None: the best number
    overheads: Overheads = PROGRAMS.target  # of the target's program between two steps

    def round(
        self, num_seqs: float, load: ExpectedLoad, num_speculative_tokens: int, prompts_a_step: float = 0.0
    ) -> PredictedRound:
        """Returns the round of `num_seqs` sequences, with what the target's program takes between two steps."""
        own = self._engines_round(num_seqs, load, num_speculative_tokens, prompts_a_step)
        return replace(own, verify_seconds=own.verify_seconds + self.overheads.seconds(num_seqs))

    def _engines_round(
        self, num_seqs: float, load: ExpectedLoad, num_speculative_tokens: int, prompts_a_step: float
    ) -> PredictedRound:
        if self.drafting is None or num_speculative_tokens == 0:
            return plain_round(self.target, num_seqs, load.mean_context)
        skipped = load.prompt_tokens - self.drafting.read_tokens(load.prompt_tokens)
        own = round_of(self.target, self.drafting, num_seqs, load.mean_context, num_speculative_tokens, skipped)
        if self.drafting.runs_ahead:
            own = replace(own, prompt_seconds=prompts_a_step * self.drafting.prompt_seconds(load.prompt_tokens))
        return replace(own, hidden_share=own.hidden_share / _num_sharing(own)) if self.is_pool else own

    @property
    def depths(self) -> Sequence[int]:
        """Depths to try."""
        if self.drafting is None:
            return (0,)
        given = self.num_speculative_tokens
        return range(MAX_DEPTH + 1) if given is None else (given,)

    def steps(self, round_: PredictedRound, num_seqs: float, prompts_a_step: float, load: ExpectedLoad) -> StepLoad:
        """Returns the rounds with 0, 1, 2, ... prompts, up to the number that fits into a step.

        A prompt adds rows to the target's step. It also adds rows to the first step of a draft on the target's device;
        others read it while the target goes on. A prompt that adds more than `load.max_prefill_seconds` to the target's
        own step, or has more tokens than a step, is computed in equal parts.
        """
        rows = round_.num_speculative_tokens + 1
        is_beside = self.drafting is not None and not self.drafting.runs_ahead
        drafting = self.drafting if is_beside and round_.num_speculative_tokens else None

        def target_seconds(num_prompts: int, parts: int = 1) -> float:
            tokens = load.computed_tokens / parts
            prompts = Segments(num_prompts, tokens, (load.prompt_tokens + load.cached_tokens - tokens) / 2, 1 / parts)
            return self.target.seconds((Segments(num_seqs, rows, load.mean_context), prompts))

        def seconds(num_prompts: int, parts: int = 1) -> float:
            draft = 0.0
            if drafting is not None:
                read = load.prompt_tokens / parts
                read_prompts = Segments(num_prompts, read, (load.prompt_tokens - read) / 2, 1 / parts)
                draft = drafting.steps.seconds((Segments(num_seqs, 1, load.mean_context), read_prompts))
            return draft + target_seconds(num_prompts, parts)

        is_alone, without = load.num_seqs == 1, target_seconds(0)
        most_tokens = max(1.0, load.max_num_batched_tokens - num_seqs * rows)
        most = most_tokens / load.computed_tokens
        if load.max_prefill_seconds is not None:
            allowed = load.max_prefill_seconds * (ALONE_FACTOR if is_alone else 1)
            most = min(most, allowed / max(target_seconds(1) - without, 1e-9))
        parts = max(1, math.ceil(1 / most))
        other = round_.seconds - seconds(0)
        return StepLoad(
            tuple(other + seconds(n, parts) for n in range(min(max(1, int(most)), load.num_seqs) + 1)),
            prompts_a_step,
            is_alone,
            parts,
            load.num_seqs,
        )

    @property
    def sources(self) -> Iterator[str]:
        """Where the step times are from (`StepPredictor.source`)."""
        yield self.target.source
        if self.drafting is not None:
            yield self.drafting.steps.source

    @property
    def acceptance(self) -> Acceptance:
        return 0.0 if self.drafting is None else self.drafting.acceptance


@dataclass(frozen=True, slots=True)
class Plan:
    """An option at a load."""

    option: str
    num_seqs: int
    round: PredictedRound
    tokens_per_second: float  # throughput of one target
    latency: Latency
    most_seqs: int | None  # maximum that fits into memory; None: unknown
    num_targets: int
    draft_devices_per_target: float  # a fraction if several targets share one
    dollars_per_hour: float | None  # total price
    dollars_per_million_tokens: float | None
    utilization: float = 1.0  # requested share of `tokens_per_second`

    @property
    def fits(self) -> bool:
        return self.most_seqs is None or self.most_seqs >= self.num_seqs


def plan(option: Option, load: ExpectedLoad, context: int | None = None, limits: LatencyLimits | None = None) -> Plan:
    """Returns the plan of `option` at `load`.

    `context`: tokens per sequence for which memory is planned; None: prompt and answer. `limits`: only depths that keep
    these are considered, if there are any.
    """
    fitting = [budget.largest_batch(context or load.longest) for budget in option.budgets]
    most_seqs = fitting[0] if fitting else None
    if len(fitting) > 1 and not fitting[1]:
        most_seqs = 0
    num_targets, num_seqs, utilization = 1, load.num_seqs, 1.0
    if load.requests_per_second is not None:
        most = load.num_seqs if most_seqs is None else max(1, min(load.num_seqs, most_seqs))
        num_targets, num_seqs, utilization = _sized(option, load, most)
    # If a draft device is too small for a target's sequences, the target needs several.
    num_devices = math.ceil(num_seqs / fitting[1]) if len(fitting) > 1 and fitting[1] else 1
    steady = _steady(option, num_seqs, load, limits)
    share = _share(option, steady.round, num_devices, fitting, num_seqs)
    dollars = None
    if option.target_dollars_per_hour is not None:
        dollars = num_targets * (option.target_dollars_per_hour + share * (option.draft_dollars_per_hour or 0.0))
    rate = steady.answers_per_second * load.answer_tokens
    return Plan(
        option.name,
        num_seqs,
        steady.round,
        rate,
        steady.latency,
        most_seqs,
        num_targets,
        share,
        dollars,
        None if dollars is None else dollars_per_million_tokens(dollars, rate * num_targets * utilization),
        utilization,
    )


def dollars_per_million_tokens(dollars_per_hour: float, tokens_per_second: float) -> float:
    return dollars_per_hour / 3600 / tokens_per_second * 1e6


def most_sequences(option: Option, load: ExpectedLoad, limits: LatencyLimits, most: int) -> int:
    """Returns the maximum number of sequences, up to `most`, within `limits`. Returns 0 if one already exceeds them."""
    low, high = 0, most
    option, load = replace(option, budgets=()), replace(load, requests_per_second=None)
    while low < high:
        middle = (low + high + 1) // 2
        if limits.admit(plan(option, replace(load, num_seqs=middle), limits=limits).latency):
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True)
class _Steady:
    round: PredictedRound
    load: StepLoad
    answers_per_second: float
    decoding: float  # mean number of sequences that have their first token
    acceptance: Acceptance
    answer_tokens: int

    @cached_property
    def latency(self) -> Latency:
        return latency(self.load, self.acceptance, self.round.num_speculative_tokens, self.answer_tokens)


def _steady(option: Option, num_seqs: int, load: ExpectedLoad, limits: LatencyLimits | None = None) -> _Steady:
    """Returns the steady state at the depth that gives the most answers; within `limits`, if one is."""
    each: list[_Steady] = []
    for depth in option.depths:
        each.append(_steady_at(option, num_seqs, load, depth, each[-1] if each else None))
        best = max(each, key=lambda steady: steady.answers_per_second)
        if len(each) - each.index(best) > WORSE_DEPTHS:
            break
    each.sort(key=lambda steady: -steady.answers_per_second)
    return next((steady for steady in each if limits and limits.admit(steady.latency)), each[0])


def _steady_at(
    option: Option, num_seqs: int, load: ExpectedLoad, depth: int, similar: _Steady | None = None
) -> _Steady:
    """Returns the steady state of `num_seqs` sequences at `depth`. Some of them wait for their first token.

    `similar`: that of another depth, which is close.
    """
    decoding, prompts_a_step = float(num_seqs), 0.0
    if similar is not None:
        decoding, prompts_a_step = similar.decoding, similar.load.prompts_a_step
    rounds = mean_rounds(option.acceptance, depth, load.answer_tokens - 1)
    for _ in range(_ITERATIONS):
        one = option.round(decoding, load, depth, prompts_a_step)
        step = option.steps(one, decoding, prompts_a_step, load)
        mean, first = step.mean_seconds, step.mean_first_token
        rate = num_seqs / (first + rounds * mean)
        if num_seqs > 1 and rate > step.most_a_second:  # the others wait for their first token
            rate = step.most_a_second
            first = num_seqs / rate - rounds * mean
        # Damped by half, because a longer step brings more prompts, which lengthen the step.
        change = max(1.0, num_seqs - rate * first) - decoding
        come = 0.0 if num_seqs == 1 else rate * mean
        decoding, prompts_a_step, before = decoding + change / 2, (prompts_a_step + come) / 2, prompts_a_step
        if abs(change) < _CONVERGED * num_seqs and abs(come - before) < _CONVERGED * (come + _CONVERGED):
            break
    return _Steady(one, step, rate, decoding, option.acceptance, load.answer_tokens)


def _sized(option: Option, load: ExpectedLoad, most: int) -> tuple[int, int, float]:
    """Returns the number of targets for the requests, the sequences of each, and the used share of their capacity."""
    assert load.requests_per_second is not None
    num_targets = math.ceil(load.requests_per_second / _steady(option, most, load).answers_per_second)
    own = load.requests_per_second / num_targets

    def rate(num_seqs: int) -> float:
        return _steady(option, num_seqs, load).answers_per_second

    num_seqs = min(most, 1 + bisect_left(range(1, most + 1), own, key=rate))
    return num_targets, num_seqs, min(1.0, own / rate(num_seqs))


def _share(option: Option, round_: PredictedRound, num_devices: int, fitting: Sequence[int], num_seqs: int) -> float:
    """Returns the number of draft devices per target."""
    if option.draft_dollars_per_hour is None or not round_.num_speculative_tokens:
        return 0.0
    if not option.is_pool or num_devices > 1:
        return float(num_devices)
    by_time = _num_sharing(round_)
    by_memory = max(1, fitting[1] // num_seqs) if len(fitting) > 1 else by_time
    return 1 / min(by_time, by_memory)


def _num_sharing(round_: PredictedRound) -> int:
    """Returns the number of targets for which a draft device of a pool has enough time."""
    return max(1, int(min(round_.targets_fed, 1e6)))
