"""What the coordinator keeps of one sequence."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.coordination.link import DraftLink
from cluster.speculation.acceptance_model import SequenceAcceptance
from cluster.speculation.drafts import Drafts
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.tree_policy import Template
from cluster.wire.messages import Proposal


@dataclass(eq=False, slots=True)
class SpeculativeSequence:
    """`token_ids` is the engine's own list of committed tokens."""

    token_ids: Sequence[int]
    num_prompt_tokens: int
    params: SamplingParams
    noise_key: NoiseKey
    num_speculative_tokens: int | None  # what its request asked for; None: the controller decides
    max_len: int = sys.maxsize  # prompt and generated tokens at most
    depth: int = 0  # draft tokens wanted in the next round
    template: Template | None = None  # from which a tree of so many is cut; None: a chain, or what its number asks for
    num_levels: int = 0  # draft tokens in a row of the proposal that was asked for
    expected_tokens: float = 1.0  # what a round of that depth commits on the average
    acceptance: SequenceAcceptance | None = None  # while it is open
    window: int = 0  # how far past the committed tokens proposals may go
    name: int = 0  # its number on the wire, a new one each time it is opened
    link: DraftLink | None = None
    acknowledged: int = 0  # committed length the drafter is known to have been told
    proposal: Proposal | None = None
    awaited_since: float | None = None  # when the proposal that is awaited was asked for
    is_late: bool = False  # a step has stopped waiting for it
    num_refusals: int = 0
    may_open_at: float = 0.0
    is_shadow: bool = False  # drafted for while nothing is speculated on, to see what would be confirmed

    @property
    def useful_depth(self) -> int:
        """`depth`, as far as so many drafts could be committed: the bonus token takes the last place."""
        return max(0, min(self.depth, self.max_len - len(self.token_ids) - 1))

    @property
    def is_awaited(self) -> bool:
        return self.awaited_since is not None and not self.is_late

    def what_fits(self, proposal: Proposal) -> Drafts | None:
        """What is left of `proposal` after the tokens committed since its base; None unless it begins with them."""
        if proposal.base == len(self.token_ids):  # nearly always
            return proposal.drafts
        return proposal.drafts.after(self.token_ids[proposal.base :])


class Round(NamedTuple):
    """One sequence's part of a step."""

    sequence: SpeculativeSequence
    drafts: Drafts = Drafts()  # that were verified
    chosen: Sequence[int] = ()  # what the target chose: the accepted drafts and the bonus token
