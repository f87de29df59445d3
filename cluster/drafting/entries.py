"""What a draft worker keeps of its links and their sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.drafters.base import DraftSequence
from cluster.speculation.params import SamplingParams
from cluster.wire.messages import Proposal, SpeculateReply, Timing

Deliver = Callable[[SpeculateReply], None]
"""Takes a reply towards a coordinator; never blocks."""


@dataclass(slots=True)
class Link:
    """Where replies go, and what its coordinator is told of the time they took."""

    deliver: Deliver
    answered_at: float  # the last time
    received_at: float = 0.0  # the last request
    num_waiting_bytes: int = 0  # of requests in the inbox
    step_seconds: float = 0.0  # the last step that had a sequence of it
    batch: int = 0  # its sequences in that step
    rows: int = 0  # and theirs
    is_first: bool = False  # for some of them, of a proposal

    def timing(self, now: float) -> Timing:
        return Timing(now - self.received_at, self.step_seconds, self.batch, self.rows, self.is_first)


@dataclass(eq=False, slots=True)
class Entry:
    """A sequence and what is owed for it."""

    wire_id: int  # its number on its link
    link: int
    sequence: DraftSequence
    granted_window: int  # how far past the committed tokens it may run, whatever k is
    target_params: SamplingParams  # what the drafter samples with differs from it by the temperature
    exponent: int = 0  # of that difference
    num_rounds: int = 0  # that were drafted with it
    owes_proposal: bool = True
    lacks: list[int] | None = None  # the nodes to extend before the proposal is complete; None: to be found out
    sent_at: float = 0.0  # its last proposal
    is_computed: bool = False  # its prompt: it has been drafted for
    is_behind: bool = False  # by more than a round commits: it was left in peace for some
    turnaround: float | None = None  # from a proposal to what was committed after it, on the average

    def has_proposal(self, max_model_len: int) -> bool:
        """Whether the proposal that is owed is complete, or as much as it can become."""
        if self.lacks is None:
            self.lacks = [] if self.sequence.is_exhausted else self.sequence.missing(max_model_len)
        return not self.lacks

    def proposal(self) -> Proposal:
        drafts = self.sequence.proposal()
        return Proposal(self.wire_id, self.sequence.num_committed, drafts.token_ids, drafts.parents)
