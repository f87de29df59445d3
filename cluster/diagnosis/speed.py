"""Tokens a second of a cluster from what its rounds take, and so what another draft, network or cache would give.

    1 / rate = (step(n (1 + k)) + wait(k) + rest) / (n E(k)) + prompts      E(k) = 1 + s_1 + ... + s_k

for n sequences in a step, where s_j is how often a draft at depth j is committed and `prompts` what those take for each
token of an answer. It is the formula of `cluster.speculation.theory` with measured parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.diagnosis.measurements import Examination, StepCurve

MAX_DEPTH = 16
_MAX_WAIT_SHARE = 2.0  # above it something else was waited for


@dataclass(frozen=True, slots=True)
class Speed:
    """Times in seconds."""

    num_sequences: float
    survival: tuple[float, ...]  # by depth from 1 on; beyond the last it falls as from the one before it
    steps: StepCurve
    draft_seconds: float  # of a draft step, for all sequences
    round_trip_seconds: float
    wait_share: float  # of drafting and round trip, what a step waits
    rest_seconds: float  # of a round, what is neither the step nor the wait
    prompt_seconds: float  # for each token of an answer
    step_factor: float = 1.0  # of steps, those of prompts too

    @classmethod
    def of(cls, found: Examination) -> Speed:
        """Of the rounds of the fastest depth."""
        plain, told = found.plain.counts, found.told.counts
        decode = plain.decode.mean_seconds
        drafted = [one.counts for one in (*found.fixed, found.auto)]
        steps = StepCurve([(plain.rows, plain.decode), *((counts.rows, counts.verify) for counts in drafted)])
        asked = told.mean_depth * told.draft.mean_seconds + found.network_seconds
        plain_token = 1.0 / max(plain.tokens_per_second, 1e-9) - plain.prompt_seconds(decode)
        return cls(
            num_sequences=told.mean_batch or plain.mean_batch,
            survival=found.survival,
            steps=steps,
            draft_seconds=told.draft.mean_seconds,
            round_trip_seconds=found.network_seconds,
            wait_share=min(told.wait_a_step / asked, _MAX_WAIT_SHARE) if asked > 0 else 1.0,
            rest_seconds=max(0.0, plain.mean_batch * plain_token - decode),
            prompt_seconds=told.prompt_seconds(steps.at(told.rows)),  # steps with prompts have drafts, too
        )

    def survival_at(self, depth: int) -> float:
        known = self.survival
        if depth <= len(known):
            return known[depth - 1]
        if not known or known[-1] <= 0.0:
            return 0.0
        last = known[-1] / known[-2] if len(known) > 1 and known[-2] > 0.0 else known[-1]
        return float(known[-1] * last ** (depth - len(known)))

    def tokens_per_round(self, depth: int) -> float:
        return 1.0 + sum(self.survival_at(place) for place in range(1, depth + 1))

    def acceptance(self, depth: int) -> float:
        """Of the draft tokens of rounds so deep whose predecessors were all accepted."""
        num_tested = self.tokens_per_round(depth - 1)
        return (self.tokens_per_round(depth) - 1.0) / num_tested

    def wait_seconds(self, depth: int) -> float:
        return self.wait_share * (depth * self.draft_seconds + self.round_trip_seconds) if depth else 0.0

    def step_seconds(self, depth: int) -> float:
        return self.step_factor * self.steps.at(self.num_sequences * (1 + depth))

    def rate(self, depth: int) -> float:
        """Tokens a second with so many draft tokens for every sequence."""
        seconds = self.step_seconds(depth) + self.wait_seconds(depth) + self.rest_seconds
        prompts = self.step_factor * self.prompt_seconds
        return 1.0 / (seconds / (self.num_sequences * self.tokens_per_round(depth)) + prompts)

    def best_depth(self) -> int:
        return max(range(MAX_DEPTH + 1), key=self.rate)

    def best_rate(self) -> float:
        return self.rate(self.best_depth())

    def break_even_acceptance(self) -> float | None:
        """How often a draft has to be accepted, at whatever depth, for some k to pay; None: no draft would pay."""
        plain = self.rate(0)
        low, high = 0.0, 1.0
        if self.accepting(high).best_rate() <= plain:
            return None
        while high - low > 1e-3:
            middle = (low + high) / 2
            if self.accepting(middle).best_rate() > plain * (1.0 + 1e-9):
                high = middle
            else:
                low = middle
        return high

    def accepting(self, rate: float) -> Speed:
        """With each draft token accepted so often when those before it are."""
        return replace(self, survival=tuple(rate**depth for depth in range(1, MAX_DEPTH + 1)))
