"""Counters of a coordinator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from cluster.telemetry.metrics import Reading


@dataclass(slots=True)
class CoordinatorStats:
    """Counters since the start."""

    num_stale_proposals: int = 0  # outdated at arrival: the target chose other tokens, or more tokens than proposed
    num_late_rounds: int = 0  # steps that gave up waiting for a proposal
    num_invalid_token_ids: int = 0  # drafts outside the target's vocabulary
    num_excess_token_ids: int = 0  # drafts beyond the granted window
    num_refused: int = 0
    num_lost: int = 0
    num_given_up: int = 0  # sequences that lost every worker that opened them
    num_without_credit: int = 0  # times that no draft worker had room for a sequence
    depths: Counter[int] = field(default_factory=Counter)  # sequences in steps, by planned depth
    plain_decodes: Counter[str] = field(default_factory=Counter)  # sequences in steps that decoded plainly, by reason
    wait_seconds: float = 0.0  # time that steps waited for proposals
    # Processor time of the engine's thread in rounds: the part that a step or a drafter waits for, and the rest.
    critical_seconds: float = 0.0
    other_seconds: float = 0.0

    def readings(self) -> Iterator[Reading]:
        """Any thread."""

        def counter(name: str, documentation: str, value: float, **labels: str) -> Reading:
            return Reading(name, documentation, value, is_counter=True, labels=labels)

        yield counter("outrider_proposal_wait_seconds", "Time that steps waited for proposals.", self.wait_seconds)
        spent = "Processor time of the engine's thread in rounds: the part that a step waits for, and the rest."
        yield counter("outrider_coordination_seconds", spent, self.critical_seconds, part="critical")
        yield counter("outrider_coordination_seconds", spent, self.other_seconds, part="other")
        dropped = "Dropped draft tokens or proposals, by reason."
        yield counter("outrider_proposals_dropped", dropped, self.num_stale_proposals, reason="stale")
        yield counter("outrider_proposals_dropped", dropped, self.num_invalid_token_ids, reason="vocabulary")
        yield counter("outrider_proposals_dropped", dropped, self.num_excess_token_ids, reason="excess")
        # `dict` makes an atomic copy: the engine's thread updates the counters.
        for depth, count in dict(self.depths).items():
            yield counter("outrider_chosen_depths", "Sequences in steps, by the chosen k.", count, k=str(depth))
        for reason, count in dict(self.plain_decodes).items():
            plain = "Sequences decoded plainly in steps, by reason."
            yield counter("outrider_plain_decodes", plain, count, reason=reason)
        yield counter("outrider_late_rounds", "Times that a step gave up waiting for a proposal.", self.num_late_rounds)
        ended = "Sequences that a draft worker refused or lost, by reason."
        yield counter("outrider_sequences_refused", ended, self.num_refused, reason="full")
        yield counter("outrider_sequences_refused", ended, self.num_lost, reason="lost")
        yield counter("outrider_sequences_refused", ended, self.num_given_up, reason="given_up")
        yield counter("outrider_sequences_refused", ended, self.num_without_credit, reason="no_credit")
