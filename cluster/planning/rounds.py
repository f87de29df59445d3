"""What a round takes.

    E(a, k)    tokens a round, bonus included (`cluster.speculation.speed`)
    round      k * t_draft(S) + round trip + t_verify(S * (k + 1)) for all S sequences; t_verify(S) alone where k = 0

What overlaps is not counted, so that a pool whose drafts run ahead gives more than is planned: `bench.pool` and
`outrider simulate` have it. Two cohorts that alternate, so that one is verified while the other is drafted for, were
tried in the formula and predicted more than simulated clusters reached (docs/DECISIONS.md); the coordinator does not
form them.

A draft device is busy for k * t_draft of a round, so it feeds

    round / (k * t_draft) = 1 + (t_verify + round trip) / (k * t_draft)

targets without making one wait, if their rounds are staggered. (The converse, 1 + (k * t_draft + round trip) /
t_verify, is the number of cohorts whose rounds would keep a target busy at all times: while one is verified the others
are drafted for.)
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.planning.kernels import Segments, burst_step
from cluster.planning.steps import Steps
from cluster.speculation.speed import expected_tokens, round_seconds

MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Drafting:
    """Who proposes, and from where."""

    steps: Steps
    acceptance_rate: float
    round_trip_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Round:
    """Of all sequences of a target. Times are in seconds."""

    num_speculative_tokens: int
    num_tokens: float  # committed for one sequence, on the average
    draft_seconds: float  # k steps of the draft
    round_trip_seconds: float
    verify_seconds: float

    @property
    def seconds(self) -> float:
        """From a sequence's commitment to its next."""
        return round_seconds(self.draft_seconds, self.verify_seconds, self.round_trip_seconds)

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.num_tokens

    @property
    def targets_fed(self) -> float:
        """By one draft device, staggered."""
        return self.seconds / self.draft_seconds if self.draft_seconds else float("inf")


def plain_round(target: Steps, num_seqs: float, context: float) -> Round:
    return Round(0, 1.0, 0.0, 0.0, target.seconds((Segments(num_seqs, 1, context),)))


def round_of(target: Steps, drafting: Drafting, num_seqs: float, context: float, num_speculative_tokens: int) -> Round:
    """Of `num_seqs` sequences with `context` tokens each."""
    return Round(
        num_speculative_tokens,
        expected_tokens(drafting.acceptance_rate, num_speculative_tokens),
        num_speculative_tokens * drafting.steps.seconds(burst_step(num_seqs, context, num_speculative_tokens)),
        drafting.round_trip_seconds,
        target.seconds((Segments(num_seqs, num_speculative_tokens + 1, context),)),
    )
