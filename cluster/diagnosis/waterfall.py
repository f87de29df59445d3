"""Explains the difference between the formula's speedup and the measured one, cause by cause.

The formula, E(a, k) t / (k t_draft + t + t_net), makes four ideal assumptions: the same acceptance a at every position,
a draft that is otherwise idle, a verify step that takes no longer than a decode step, and a round without any other
parts. Each stage replaces an assumption by a measurement, and the loss of speedup is the share of that cause. The
difference between the last stage and the measured speedup is unexplained.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.diagnosis.measurements import Counts, Measured
from cluster.speculation.speed import RoundCosts, speedup, tokens_per_round


@dataclass(frozen=True, slots=True)
class Stage:
    """`speedup`: the predicted speedup after `cause` and all previous causes."""

    cause: str
    speedup: float
    loss: float


@dataclass(frozen=True, slots=True)
class Waterfall:
    promised: float
    stages: tuple[Stage, ...]
    measured: float

    @property
    def unexplained(self) -> float:
        """Share of the measured speedup that no cause explains; negative if the causes explain too much."""
        return self.stages[-1].speedup / max(self.measured, 1e-9) - 1.0


@dataclass(frozen=True, slots=True)
class PredictedDraft:
    """Expected properties of the draft before it served the load."""

    acceptance: float  # acceptance rate of a draft token
    draft_seconds: float
    earlier_acceptance: float  # rate of the same draft when it was new; the current rate if unknown
    equal_acceptance: float  # rate if drafts are sampled at the target's temperature


def waterfall(plain: Measured, drafted: Measured, predicted: PredictedDraft, network_seconds: float) -> Waterfall:
    """Returns the stages between the expected and the measured speedup.

    `drafted`: measured with one k for all, at the load and temperature of `plain`.
    """
    without, with_drafts = plain.counts, drafted.counts
    k = max(1, round(with_drafts.mean_depth))
    decode, verify = without.decode.mean_seconds, with_drafts.verify.mean_seconds
    net = network_seconds

    def formula(acceptance: float, draft_seconds: float) -> float:
        return speedup(acceptance, k, RoundCosts(draft_seconds, decode, net))

    def of_round(tokens: float, draft_seconds: float, step: float, rest: float = 0.0, plain_rest: float = 0.0) -> float:
        return RoundCosts(draft_seconds, step, net, decode, rest, plain_rest).speedup(tokens, k)

    measured_draft = with_drafts.draft.mean_seconds
    tokens = tokens_per_round(with_drafts.survival[:k])
    bookkeeping = _bookkeeping(with_drafts, k * measured_draft + net)
    plain_bookkeeping = _bookkeeping(without, 0.0)
    promised = formula(predicted.equal_acceptance, predicted.draft_seconds)
    at_temperature = formula(predicted.earlier_acceptance, predicted.draft_seconds)
    drifted = formula(predicted.acceptance, predicted.draft_seconds)
    by_position = of_round(tokens, predicted.draft_seconds, decode)
    slower = of_round(tokens, measured_draft, decode)
    full = of_round(tokens, measured_draft, verify)
    booked = of_round(tokens, measured_draft, verify, bookkeeping, plain_bookkeeping)
    contended = with_drafts.tokens_per_busy_second / without.tokens_per_busy_second
    after = (
        ("draft sampled at another temperature", at_temperature),
        ("drift of the draft", drifted),
        ("acceptance differs by position", by_position),
        ("draft slower than predicted", slower),
        ("verify takes more than a decode: bandwidth full", full),
        ("bookkeeping around the steps", booked),
        ("contention with other requests", contended),
    )
    stages, before = [], promised
    for cause, left in after:
        stages.append(Stage(cause, left, before - left))
        before = left
    measured = with_drafts.tokens_per_second / max(without.tokens_per_second, 1e-9)
    return Waterfall(promised, tuple(stages), measured)


def _bookkeeping(counts: Counts, asked_seconds: float) -> float:
    """Returns the part of a round that is neither its step nor drafting.

    It consists of the engine's loop between steps, and of the wait minus `asked_seconds` (negative with overlap)."""
    longer = counts.wait_a_step - asked_seconds if counts.verify.count else 0.0
    return longer + counts.bookkeeping_a_step


def predicted_draft(
    alone: Measured, drafted: Measured, *, equal: float | None, earlier: float | None
) -> PredictedDraft:
    """Returns the expected properties of a draft, from measurements.

    `alone`: load of one stream with drafts, so the draft was otherwise idle. `equal`: acceptance if drafts are sampled
    like the target's tokens; None: `earlier`. `earlier`: acceptance of the same draft when it was new; None: the
    current acceptance.
    """
    survival = drafted.counts.survival
    now = survival[0] if survival else 0.0
    return PredictedDraft(
        now, alone.counts.draft.mean_seconds, earlier if earlier is not None else now, equal or earlier or now
    )
