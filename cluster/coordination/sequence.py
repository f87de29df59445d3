"""A sequence as the coordinator sees it, and the link it is drafted for on.

A sequence that runs may be drafted for by one worker at a time:

    joined ──▶ waiting ──opened──▶ asked ──answered──▶ asked ─ ...
                  ▲                  │ gave_up: no step waits for this proposal any more
                  └── detached ◀─────┘ the link is down, the worker refused or lost it, or another is to have it

These transitions are the methods below, and nothing outside this module assigns a field of a sequence: all else reads
them. (`tests/cluster/coordination/test_ownership.py` holds the project to it.)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cluster.coordination.base import Link
from cluster.coordination.stats import CoordinatorStats
from cluster.speculation.acceptance_model import SequenceAcceptance
from cluster.speculation.costs import DraftStep, LinkCosts
from cluster.speculation.drafts import Drafts
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.tree import Shape, num_levels
from cluster.speculation.tree_policy import Template
from cluster.wire.messages import Advance, Proposal, SpeculateReply, SpeculateRequest

NO_DRAFTS = Drafts()


@dataclass(eq=False, slots=True)
class SpeculativeSequence:
    """`token_ids` is the engine's own list of committed tokens, and grows as it commits."""

    token_ids: Sequence[int]
    num_prompt_tokens: int
    params: SamplingParams
    noise_key: NoiseKey
    num_speculative_tokens: int | None  # what its request asked for; None: the controller decides
    max_len: int = sys.maxsize  # prompt and generated tokens at most
    cache_root: bytes = b""  # a drafter shares KV only between sequences of the same

    # What is planned for it.
    acceptance: SequenceAcceptance | None = None  # None before it has joined
    depth: int = 0  # draft tokens wanted in the next round
    template: Template | None = None  # from which a tree of so many is cut; None: a chain, or what its number asks for
    expected_tokens: float = 1.0  # what a round of that depth commits on the average

    # Where it is drafted for.
    link: ActiveLink | None = None
    wire_id: int = 0  # its number on the link, a new one each time it is opened
    window: int = 0  # how far past the committed tokens proposals may go
    num_refusals: int = 0  # in a row
    may_open_at: float = 0.0
    num_deaths: int = 0  # links in a row that went down before the first answer after its opening

    # The round.
    num_acknowledged: int = 0  # committed tokens the drafter is known to have been told
    num_levels: int = 0  # draft tokens in a row of the proposal that was asked for
    awaited_since: float | None = None  # when the proposal that is awaited was asked for
    is_late: bool = False  # a step has stopped waiting for it
    has_answered: bool = False  # its drafter, since it was opened there: it has computed all its tokens
    proposal: Proposal | None = None

    @property
    def useful_depth(self) -> int:
        """`depth`, as far as so many drafts could be committed: the bonus token takes the last place."""
        return max(0, min(self.depth, self.max_len - len(self.token_ids) - 1))

    @property
    def is_awaited(self) -> bool:
        return self.awaited_since is not None and not self.is_late

    # Planning.

    def joined(self, acceptance: SequenceAcceptance, window: int) -> None:
        """It runs from now on, and may be drafted for."""
        self.acceptance, self.window = acceptance, window

    def drafted_by(self, acceptance: SequenceAcceptance) -> None:
        """Its drafts come, or are going to come, of a model whose drafts are accepted like that."""
        self.acceptance = acceptance

    def planned(self, depth: int, template: Template | None, expected_tokens: float = 1.0) -> None:
        self.depth, self.template, self.expected_tokens = depth, template, expected_tokens

    def left(self) -> None:
        """It has ended: nothing more is learned from its rounds."""
        self.acceptance = None

    # Where it is drafted for.

    def opened(self, link: ActiveLink, wire_id: int) -> None:
        """It is drafted for on `link`, whose worker gets all its tokens."""
        self.link, self.wire_id, self.num_acknowledged = link, wire_id, len(self.token_ids)
        self.has_answered = False
        link.sequences[wire_id] = self

    def detached(self) -> None:
        """Nobody drafts for it any more."""
        if self.link is not None:
            self.link.sequences.pop(self.wire_id, None)
        self.link = self.proposal = self.awaited_since = None
        self.is_late = False

    def lost_its_link(self) -> None:
        """The link went down, and with it whatever its worker knew."""
        self.num_deaths += not self.has_answered
        self.detached()

    def turned_away(self, until: float) -> None:
        """Its worker would not, or could not, draft for it: it opens nowhere before `until`."""
        self.may_open_at = until
        self.num_refusals += 1

    def kept_waiting(self, until: float) -> None:
        """No worker has room: it opens nowhere before `until`."""
        self.may_open_at = until

    # The round.

    def asked(self, num_drafts: int, shape: Shape | None, now: float) -> None:
        """Its next proposal is to have `num_drafts` tokens; with 0 its drafter is left in peace.

        One that is late stays late until it is heard of. The worker will hardly have room so soon for a sequence that
        it refused: nobody waits for its answer.
        """
        if num_drafts == 0:
            self.awaited_since, self.is_late = None, False
            return
        self.num_levels = num_drafts if shape is None else num_levels(shape, num_drafts)
        if not (self.is_late or self.num_refusals):
            self.awaited_since = now

    def advance(self, num_drafts: int, shape: Shape | None, now: float) -> None:
        """Its drafter, which it must have, is told every token it may not know, and asked for the next proposal."""
        self.asked(num_drafts, shape, now)
        if num_drafts:
            assert self.link is not None
            wire_id, known = self.wire_id, self.num_acknowledged
            self.link.request.advances[wire_id] = Advance(wire_id, known, self.token_ids[known:], num_drafts, shape)
            self.link.owes(self.num_levels)

    def answered(self, proposal: Proposal, now: float, stats: CoordinatorStats) -> None:
        """Takes `proposal` in, as far as it is of use after the tokens committed since its base."""
        base, num_tokens = proposal.base, len(self.token_ids)
        self.has_answered, self.num_deaths = True, 0
        if not self.num_acknowledged <= base <= num_tokens:
            stats.num_stale_proposals += 1
            return
        num_excess = len(proposal.token_ids) - self.window
        if num_excess > 0:
            stats.num_excess_token_ids += num_excess
            drafts = proposal.drafts.first(self.window)
            proposal = replace(proposal, token_ids=drafts.token_ids, parents=drafts.parents)
        self.num_acknowledged, self.num_refusals = base, 0
        if base == num_tokens:  # nearly always
            self.proposal, self.awaited_since, self.is_late = proposal, None, False
            return
        if self.what_fits(proposal) is not None:
            self.proposal = proposal
        else:
            stats.num_stale_proposals += 1
        if self.is_late:  # the drafter lives but trails behind: what it was told since gets a budget of its own
            self.awaited_since, self.is_late = now, False

    def gave_up(self) -> None:
        """A step waits no longer for its proposal, nor will the next."""
        self.is_late = True

    def drafts(self, depth: int) -> Drafts:
        """What of the last proposal follows the committed tokens, `depth` tokens at most."""
        if self.proposal is None or depth == 0:
            return NO_DRAFTS
        drafts = self.what_fits(self.proposal)
        if drafts is None:
            self.proposal = None
            return NO_DRAFTS
        return drafts.first(depth)

    def what_fits(self, proposal: Proposal) -> Drafts | None:
        """What is left of `proposal` after the tokens committed since its base; None unless it begins with them."""
        if proposal.base == len(self.token_ids):  # nearly always
            return proposal.drafts
        return proposal.drafts.after(self.token_ids[proposal.base :])


@dataclass(eq=False, slots=True)
class ActiveLink:
    """A link that is up: its sequences by wire ID, what is to be sent on it, and what its proposals take."""

    link: Link
    costs: LinkCosts
    model: str = ""  # that drafts there
    expected_round_trip: float | None = None  # seconds, by its place; None: nobody knows
    sequences: dict[int, SpeculativeSequence] = field(default_factory=dict)
    request: SpeculateRequest = field(default_factory=SpeculateRequest)
    has_proposed: bool = False  # drafts of anything
    credit: int | None = None  # tokens of new sequences there is room for, as far as is known
    late_since: float | None = None  # when a proposal was late, and nothing has come since
    num_owed: int = 0  # proposals that were asked for and no step has had yet, without the first ones
    depth_owed: int = 0  # of the deepest of them
    observed: list[tuple[float, DraftStep]] = field(default_factory=list)  # replies that `costs` has not learned from
    num_ejections: int = 0
    ejected_until: float = 0.0
    tried_at: int = 0  # the number of its last trial

    @property
    def is_guessed(self) -> bool:
        """Whether its place says how far it is, and nothing was measured yet."""
        return self.expected_round_trip is not None and not self.costs.is_known and not self.sequences

    def send(self) -> None:
        """Hands over what is waiting, if anything is."""
        if self.request:
            self.link.send(self.request)
            self.request = SpeculateRequest()

    def owes(self, depth: int) -> None:
        """A proposal so deep was asked for."""
        self.num_owed += 1
        if depth > self.depth_owed:
            self.depth_owed = depth

    def waited(self, seconds: float) -> None:
        """A step has waited so long for what was owed, and has it."""
        if self.num_owed:
            self.costs.observe_wait(seconds, self.depth_owed, self.num_owed)
            self.num_owed = self.depth_owed = 0

    def went_without(self) -> None:
        """A step did not wait for what was owed, and has not got it, which says nothing of what a wait would be."""
        self.num_owed = self.depth_owed = 0

    def was_late(self, now: float) -> None:
        """A step gave up waiting for one of its proposals."""
        self.late_since = self.late_since or now

    def heard(self, reply: SpeculateReply, answer_seconds: float) -> None:
        """`reply` came, so long after the last message was sent; its proposals and refusals are the caller's."""
        self.late_since, self.credit = None, reply.credit
        self.has_proposed = self.has_proposed or bool(reply.proposals)
        if reply.timing is not None:
            timing = reply.timing
            step = DraftStep(timing.step_seconds, timing.batch, timing.rows or timing.batch, timing.is_first)
            self.observed.append((answer_seconds - timing.held_seconds, step))
            if not self.costs.is_known:
                self.learn()

    def learn(self) -> None:
        """Learns what proposals take from the replies since the last call."""
        for overhead_seconds, step in self.observed:
            self.costs.observe_reply(overhead_seconds, step)
        self.observed.clear()


class Round(NamedTuple):
    """One sequence's part of a step."""

    sequence: SpeculativeSequence
    drafts: Drafts = NO_DRAFTS  # that were verified
    chosen: Sequence[int] = ()  # what the target chose: the accepted drafts and the bonus token
