"""The time of a round.

    E(a, k)    tokens a round, bonus included (`cluster.speculation.speed`)
    round      (1 - h) (k * t_draft(S) + round trip) + t_verify(S * (k + 1)) for all S sequences, and at least
               k * t_draft(S) and the draft's time for the prompts of a round; t_verify(S) alone if k = 0

h is the share of drafting and round trip that overlaps with verification, because the draft worker runs ahead on its
own device (`RUN_AHEAD_HIDES`). Targets that share a draft device also share its time for running ahead, so each gets an
equal part of h. No answer waits for its prompt at the draft: until then it goes on without drafts.

A draft device is busy for k * t_draft of a round without run-ahead, and for prompts. So if the rounds of the targets
are staggered, it can draft without delay for

    round / (k * t_draft + prompts)

targets. (Conversely, with 1 + (k * t_draft + round trip) / t_verify cohorts of sequences a target would be busy at all
times: it verifies one cohort while the others get their drafts.)
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.planning.kernels import Segments, burst_step
from cluster.planning.steps import StepPredictor
from cluster.speculation.speed import Acceptance, round_seconds, survivals

MAX_DEPTH = 16
# Fitted to `bench.pool`: plans are within 20 % of the measurement in 84 of 88 cells, with a median ratio of 1.03
# (docs/PLANNING.md). Without this share plans are up to 43 % too low.
RUN_AHEAD_HIDES = 0.7


@dataclass(frozen=True, slots=True)
class Drafting:
    """The draft: its step times, its acceptance, and its round trip."""

    steps: StepPredictor
    acceptance: Acceptance
    round_trip_seconds: float = 0.0
    hidden_share: float = 0.0  # share of drafting and round trip that run-ahead hides; 0: on one device
    is_one_pass: bool = False  # whether one step makes all drafts of a round
    context_tokens: int | None = None  # maximum tokens of a prompt that the draft reads; None: all

    @property
    def runs_ahead(self) -> bool:
        """True if the draft has a device of its own, on which it reads prompts while the target goes on."""
        return self.hidden_share > 0

    def read_tokens(self, prompt_tokens: int) -> int:
        """Returns how many tokens of a prompt the draft reads."""
        return prompt_tokens if self.context_tokens is None else min(prompt_tokens, self.context_tokens)

    def prompt_seconds(self, prompt_tokens: int) -> float:
        return self.steps.seconds((Segments(1, self.read_tokens(prompt_tokens), 0, sampled_rows=1),))

    def seconds(self, num_seqs: float, context: float, num_speculative_tokens: int) -> float:
        """Returns the seconds to draft `num_speculative_tokens` tokens for each of `num_seqs` sequences."""
        if self.is_one_pass:
            return self.steps.seconds((Segments(num_seqs, num_speculative_tokens + 1, context),))
        return num_speculative_tokens * self.steps.seconds(burst_step(num_seqs, context, num_speculative_tokens))


@dataclass(frozen=True, slots=True)
class PredictedRound:
    """A round of all sequences of a target. Times are in seconds."""

    num_speculative_tokens: int
    num_tokens: float  # mean tokens committed per sequence
    draft_seconds: float  # time of the draft's k steps, or of its single step
    round_trip_seconds: float
    verify_seconds: float
    hidden_share: float = 0.0  # hidden share of `draft_seconds` and `round_trip_seconds`
    prompt_seconds: float = 0.0  # draft's time for prompts in a round, if no round waits for them

    @property
    def seconds(self) -> float:
        """Seconds from one commit of a sequence to its next commit."""
        exposed = 1 - self.hidden_share
        apart = round_seconds(exposed * self.draft_seconds, self.verify_seconds, exposed * self.round_trip_seconds)
        return max(apart, self.busy_seconds)

    @property
    def busy_seconds(self) -> float:
        """Seconds that the draft computes in a round."""
        return self.draft_seconds + self.prompt_seconds

    @property
    def targets_fed(self) -> float:
        """Number of targets for which one draft device can draft without delay, if their rounds are staggered."""
        without_run_ahead = round_seconds(self.draft_seconds, self.verify_seconds, self.round_trip_seconds)
        return without_run_ahead / self.busy_seconds if self.busy_seconds else float("inf")


def plain_round(target: StepPredictor, num_seqs: float, context: float) -> PredictedRound:
    return PredictedRound(0, 1.0, 0.0, 0.0, target.seconds((Segments(num_seqs, 1, context),)))


def round_of(
    target: StepPredictor,
    drafting: Drafting,
    num_seqs: float,
    context: float,
    num_speculative_tokens: int,
    num_skipped: float = 0.0,
) -> PredictedRound:
    """Returns the round of `num_seqs` sequences with `context` tokens each. The draft skips `num_skipped` of these."""
    return PredictedRound(
        num_speculative_tokens,
        sum(survivals(drafting.acceptance, num_speculative_tokens)),
        drafting.seconds(num_seqs, context - num_skipped, num_speculative_tokens),
        drafting.round_trip_seconds,
        target.seconds((Segments(num_seqs, num_speculative_tokens + 1, context),)),
        drafting.hidden_share,
    )
