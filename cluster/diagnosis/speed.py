"""Predicts a cluster's tokens per second from the parts of its rounds. The parts can be replaced to predict changes.

    1 / rate = (r(k) + m) / streams (step(n (1 + k)) + wait(k) + rest) + prompts
    r(k) = (1 - p) / E(k) + p      E(k) = 1 + s_1 + ... + s_k      n = streams r(k) / (r(k) + m)

For each token of an answer, its sequence is part of r steps. Most of these are rounds; s_j is the share of drafts at
depth j that are committed. A share p of the tokens is decoded without drafts, such as the first token of an answer. The
sequence misses m further steps per token, for example while its prompt is computed, so n sequences are in a step.
`prompts` are the seconds per token that prompts add to steps. This is the formula of `cluster.speculation.speed` with
measured parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.diagnosis.measurements import MAX_DEPTH, Examination, StepTotals, TimeCurve
from cluster.speculation.speed import tokens_per_round

_MAX_WAIT_SHARE = 2.0  # above this ratio the step waited for something else
_NOTHING = (0.0, StepTotals(1.0, 0.0))  # time and totals at depth 0


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """Prediction of a cluster's speed from measured parts. Times are in seconds."""

    num_streams: float  # streams that do not wait for blocks
    survival: tuple[float, ...]  # by depth from 1; deeper survival falls at the rate of the last position
    steps: TimeCurve  # over rows
    drafting: TimeCurve  # drafting time of a round for all sequences, over its depth
    draft_seconds: float  # time of a draft step, at the reported depth
    round_trip_seconds: float
    wait_share: float  # wait of a step, as a share of drafting and round trip
    rest_seconds: float  # time of a round outside the step and the wait
    plain_rest_seconds: float  # time of a round without drafts, outside the step
    plain_share: float  # share of the tokens that came without drafts, in a load with drafts
    missed_steps: float  # steps per token that do not include the token's sequence
    prompt_seconds: float  # prompt time per token of an answer
    plain_prompt_seconds: float  # the same without drafts
    max_depth: int

    @classmethod
    def of(cls, found: Examination) -> SpeedModel:
        """Returns the model of the cluster that was measured in `found`.

        Steps, drafting and acceptance are measured over all depths. All other parts are those at the fastest depth.
        """
        plain, fastest = found.plain.counts, found.fastest.counts
        drafted = [one.counts for one in (*found.fixed, found.auto)]
        steps = TimeCurve([(plain.rows, plain.decode), *((counts.rows, counts.verify) for counts in drafted)])
        reached = [one.counts for one in found.reached if one.counts.num_rounds]
        drafting = TimeCurve([_NOTHING, *((one.mean_depth, one.draft.times(one.mean_depth)) for one in reached)])
        asked = drafting.at(fastest.mean_depth) + found.network_seconds
        num_streams = max(found.num_running, fastest.mean_batch)
        in_steps, num_tokens = fastest.mean_batch * fastest.num_steps, max(fastest.num_tokens, 1.0)
        return cls(
            num_streams=num_streams,
            survival=found.survival,
            steps=steps,
            drafting=drafting,
            draft_seconds=fastest.draft.mean_seconds,
            round_trip_seconds=found.network_seconds,
            wait_share=min(fastest.wait_a_step / asked, _MAX_WAIT_SHARE) if asked > 0 else 1.0,
            rest_seconds=fastest.bookkeeping_a_step,
            plain_rest_seconds=plain.bookkeeping_a_step,
            plain_share=max(0.0, in_steps - fastest.num_rounds) / num_tokens,
            missed_steps=max(0.0, num_streams * fastest.num_steps - in_steps) / num_tokens,
            prompt_seconds=fastest.prompt_seconds(steps.at(fastest.rows)),  # steps with prompts have drafts, too
            plain_prompt_seconds=plain.prompt_seconds(plain.decode.mean_seconds),
            max_depth=min(found.max_depth, MAX_DEPTH),
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
        return tokens_per_round(self.survival_at(place) for place in range(1, depth + 1))

    def acceptance(self, depth: int) -> float:
        """Returns the acceptance rate in rounds of `depth` of draft tokens whose predecessors were all accepted."""
        num_tested = self.tokens_per_round(depth - 1)
        return (self.tokens_per_round(depth) - 1.0) / num_tested

    def wait_seconds(self, depth: int) -> float:
        return self.wait_share * (self.drafting.at(depth) + self.round_trip_seconds) if depth else 0.0

    def step_seconds(self, depth: int) -> float:
        part_of = self._steps_a_token(depth)
        num_sequences = self.num_streams * part_of / (part_of + self.missed_steps)
        return self.steps.at(num_sequences * (1 + depth))

    def _steps_a_token(self, depth: int) -> float:
        """Returns the number of steps per token in which a sequence takes part."""
        return (1.0 - self.plain_share) / self.tokens_per_round(depth) + self.plain_share

    def rate(self, depth: int) -> float:
        """Returns the tokens per second with `depth` draft tokens for every sequence."""
        rest, prompts = (
            (self.rest_seconds, self.prompt_seconds) if depth else (self.plain_rest_seconds, self.plain_prompt_seconds)
        )
        seconds = self.step_seconds(depth) + self.wait_seconds(depth) + rest
        num_steps = (self._steps_a_token(depth) + self.missed_steps) / self.num_streams
        return 1.0 / (num_steps * seconds + prompts)

    def best_depth(self) -> int:
        return max(range(self.max_depth + 1), key=self.rate)

    def best_rate(self) -> float:
        return self.rate(self.best_depth())

    def break_even_acceptance(self) -> float | None:
        """Returns the lowest acceptance rate at which some k pays; None if no draft pays."""
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

    def with_draft(self, seconds: float) -> SpeedModel:
        """Returns the model with another draft whose steps take `seconds`.

        This also changes the time of the target's prompts: on shared cores, the target takes longer for a prompt while
        the draft computes the same prompt.
        """
        difference = max(0.0, self.prompt_seconds - self.plain_prompt_seconds)
        less = min(1.0, seconds / self.draft_seconds) if self.draft_seconds else 1.0
        return replace(
            self,
            drafting=TimeCurve([_NOTHING, (MAX_DEPTH, StepTotals(1.0, MAX_DEPTH * seconds))]),
            draft_seconds=seconds,
            prompt_seconds=self.prompt_seconds - (1.0 - less) * difference,
        )

    def accepting(self, rate: float) -> SpeedModel:
        """Returns the model in which each draft is accepted with probability `rate` if those before it are."""
        return replace(self, survival=tuple(rate**depth for depth in range(1, MAX_DEPTH + 1)))
