"""A sequence in the coordinator, and the link to the worker that drafts for it.

One worker at a time may draft for a running sequence:

    joined ──▶ waiting ──opened──▶ asked ──answered──▶ asked ─ ...
                  ▲                  │ gave_up: no step waits for this proposal any more
                  └── detached ◀─────┘ the link is down, the worker refused or lost it, or it moves to another worker

The methods below make these transitions. Code outside this module only reads the fields of a sequence, and never
assigns them. (`tests/cluster/coordination/test_ownership.py` enforces this.)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from cluster.coordination.base import Link
from cluster.coordination.stats import CoordinatorStats
from cluster.speculation.acceptance_model import SequenceAcceptance
from cluster.speculation.costs import DraftStep, LinkCosts
from cluster.speculation.drafts import NO_DRAFTS, Drafts, num_useful_drafts
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.tree import Shape, num_levels
from cluster.speculation.tree_policy import Template
from cluster.wire.messages import Advance, Proposal, SpeculateReply, SpeculateRequest

MAX_WIDTH = 64  # maximum nodes of a tree for each token of the window


@dataclass(eq=False, slots=True)
class SpeculativeSequence:
    """State of a sequence that may be drafted for.

    `token_ids` is the engine's own list of committed tokens, which grows as the engine commits.
    """

    token_ids: Sequence[int]
    num_prompt_tokens: int
    params: SamplingParams
    noise_key: NoiseKey
    num_speculative_tokens: int | None  # the request's own number; None: the controller decides
    max_len: int = sys.maxsize  # maximum number of tokens, prompt and generated
    cache_root: bytes = b""  # a drafter shares KV only between sequences with the same root
    conversation: bytes = b""  # the same for all turns of a conversation; b"": unknown
    output_limit: float | None = None  # the request's own limit of seconds per output token; None: the configured one
    owner: bytes = b""  # what others said is no draft for it

    # The plan.
    acceptance: SequenceAcceptance | None = None  # None before the sequence has joined
    depth: int = 0  # draft tokens wanted in the next round
    template: Template | None = (
        None  # its first `depth` nodes are the tree to request; None: a chain, or the request's own number
    )
    expected_tokens: float = 1.0  # mean number of tokens that a round with `depth` drafts commits
    expected_by: Sequence[float] | None = None  # mean number for 0, 1, ... drafts; None: not computed yet
    num_rows: int = sys.maxsize  # maximum drafts in the next step, if rows are reserved before drafts are collected

    # The link.
    link: ActiveLink | None = None
    wire_id: int = 0  # the sequence's number on the link, a new one for each opening
    window: int = 0  # maximum number of tokens of a proposal after the committed tokens
    num_refusals: int = 0  # consecutive refusals
    may_open_at: float = 0.0
    num_lost_links: int = 0  # consecutive links that went down before they answered an opening

    # The round.
    num_acknowledged: int = 0  # committed tokens that the drafter has acknowledged
    num_levels: int = 0  # number of levels in the requested proposal; for a chain, its number of tokens
    shape: Shape | None = None  # the shape of the requested tree; None: a chain
    awaited_since: float | None = None  # when the awaited proposal was requested
    is_late: bool = False  # whether a step gave up waiting for the awaited proposal
    has_answered: bool = False  # whether the drafter answered since the opening, so it has computed the whole prompt
    proposal: Drafts | None = None
    base: int = 0  # number of tokens that `proposal` follows
    num_ready: int = 0  # number of the requested levels that have arrived

    @property
    def useful_depth(self) -> int:
        """`depth`, limited to the drafts that could be committed."""
        return num_useful_drafts(self.depth, len(self.token_ids), self.max_len)

    @property
    def is_automatic(self) -> bool:
        """True if the controller decides the depth."""
        return self.num_speculative_tokens is None

    @property
    def is_awaited(self) -> bool:
        return self.awaited_since is not None and not self.is_late

    # Planning.

    def joined(self, acceptance: SequenceAcceptance, window: int) -> None:
        """Marks the sequence as running, so that a worker may draft for it."""
        self.acceptance, self.window = acceptance, window

    def drafted_by(self, acceptance: SequenceAcceptance) -> None:
        """Sets the acceptance of the model that drafts, or is about to draft, for the sequence."""
        self.acceptance = acceptance

    def planned(self, depth: int, template: Template | None, expected_tokens: float = 1.0) -> None:
        self.depth, self.template, self.expected_tokens, self.expected_by = depth, template, expected_tokens, None

    def reserved(self, num_rows: int) -> None:
        """Limits the drafts of the next step to `num_rows`."""
        self.num_rows = num_rows

    def left(self) -> None:
        """Marks the sequence as ended. The planner no longer learns from its rounds."""
        self.acceptance = None

    # The link.

    def opened(self, link: ActiveLink, wire_id: int) -> None:
        """Assigns the sequence to `link`, whose worker gets all its tokens."""
        self.link, self.wire_id, self.num_acknowledged = link, wire_id, len(self.token_ids)
        self.has_answered = False
        link.sequences[wire_id] = self

    def detached(self) -> None:
        """Removes the sequence from its link: no worker drafts for it any more."""
        if self.link is not None:
            self.link.sequences.pop(self.wire_id, None)
        self.link = self.awaited_since = None
        self.proposal, self.num_ready = None, 0
        self.is_late = False

    def lost_its_link(self) -> None:
        """Detaches the sequence from a link that went down; its worker has lost the sequence."""
        self.num_lost_links += not self.has_answered
        self.detached()

    def turned_away(self, until: float) -> None:
        """Records that the worker refused or lost the sequence, which is not opened again before `until`."""
        self.may_open_at = until
        self.num_refusals += 1

    def kept_waiting(self, until: float) -> None:
        """Records that no worker has room for the sequence, which is not opened before `until`."""
        self.may_open_at = until

    # The round.

    def asked(self, num_drafts: int, shape: Shape | None, now: float) -> None:
        """Records a request for a proposal with `num_drafts` tokens; 0: the drafter gets no request.

        A late proposal stays late until a reply comes. After a refusal, no step waits for the answer to the next
        opening, because a worker probably has no room so soon.
        """
        if num_drafts == 0:
            self.awaited_since, self.is_late = None, False
            return
        self.num_levels = num_drafts if shape is None else num_levels(shape, num_drafts)
        self.shape = shape
        self.num_ready = 0 if self.proposal is None else self._levels_of(self.proposal)
        if self.num_ready >= self.num_levels:
            self.awaited_since, self.is_late = None, False
        elif not (self.is_late or self.num_refusals):
            self.awaited_since = now

    def spared(self) -> None:
        """Records that the drafter is asked for nothing because other drafts are better: none of its own is ready."""
        self.num_levels = self.num_ready = 0

    def advance(self, num_drafts: int, shape: Shape | None, now: float) -> None:
        """Sends the drafter the tokens it lacks, and requests the next proposal. The sequence must have a drafter."""
        self.went_on()
        self.asked(num_drafts, shape, now)
        if num_drafts:
            assert self.link is not None
            if self.has_answered and self.link.owes_since is None:
                self.link.owes_since = now
            wire_id, known = self.wire_id, self.num_acknowledged
            self.link.request.advances[wire_id] = Advance(wire_id, known, self.token_ids[known:], num_drafts, shape)

    def answered(self, proposal: Proposal, now: float, stats: CoordinatorStats) -> None:
        """Stores `proposal` if it agrees with the tokens committed since its base; otherwise counts it as stale.

        A proposal may come in parts. Each part extends the stored proposal. Parts may come after all requested tokens
        have arrived, because the drafter runs ahead.
        """
        if proposal.start:
            before = self.proposal or NO_DRAFTS
            grown = Proposal(self.wire_id, self.base, before.token_ids, before.parents).grown(proposal)
            if grown is None:
                return  # it belongs to an abandoned branch of the tree
            proposal = grown
        drafts = self._within_limits(proposal, stats)
        base, num_tokens = proposal.base, len(self.token_ids)
        self.has_answered, self.num_lost_links = True, 0
        if not self.num_acknowledged <= base <= num_tokens:
            stats.num_stale_proposals += 1
            return
        self.num_acknowledged, self.num_refusals = base, 0
        fits = drafts if base == num_tokens else drafts.after(self.token_ids[base:])
        if fits is None:
            stats.num_stale_proposals += 1
        else:
            self.proposal, self.base, self.num_ready = drafts, base, self._levels_of(fits)
        if base == num_tokens:  # the usual case
            if proposal.is_whole:
                self.awaited_since, self.is_late = None, False
        elif self.is_late:  # the drafter is alive but behind: the timeout for its answers to newer messages starts now
            self.awaited_since, self.is_late = now, False

    def _within_limits(self, proposal: Proposal, stats: CoordinatorStats) -> Drafts:
        """Returns the drafts of `proposal`, cut to the number that the window allows; counts the excess."""
        most = self.window if proposal.parents is None else MAX_WIDTH * self.window
        num_excess = len(proposal.token_ids) - most
        if num_excess <= 0:
            return proposal.drafts
        stats.num_excess_token_ids += num_excess
        return proposal.drafts.first(most)

    def gave_up(self) -> None:
        """Marks the awaited proposal as late: no step waits for it any more."""
        self.is_late = True

    def went_on(self) -> None:
        """Removes from the proposal the tokens committed since its base; drops a proposal that disagrees with these."""
        self.proposal, self.base = self._what_fits() or None, len(self.token_ids)

    def expected_of(self, num_drafts: int) -> float:
        """Returns the expected number of tokens that a round with the first `num_drafts` planned drafts commits."""
        if num_drafts == 0:
            return 1.0
        if num_drafts >= self.depth or self.acceptance is None:
            return self.expected_tokens
        if self.expected_by is None:
            self.expected_by = [1.0 + total for total in accumulate(self.acceptance.survival(), initial=0.0)]
        return self.expected_by[num_drafts]

    def drafts(self, depth: int) -> Drafts:
        """Returns the part of the last proposal that follows the committed tokens, at most `depth` tokens."""
        fits = self._what_fits() if depth else NO_DRAFTS
        if fits is None:
            self.proposal = None
            return NO_DRAFTS
        return fits.main_path(depth) if self.shape is None else fits.first(depth)

    def _what_fits(self) -> Drafts | None:
        """Returns the drafts of the proposal after the committed tokens; None if there is none, or they disagree."""
        if self.proposal is None or self.base == len(self.token_ids):
            return self.proposal
        return self.proposal.after(self.token_ids[self.base :])

    def _levels_of(self, fits: Drafts) -> int:
        """Returns how many of the requested levels `fits` contains."""
        path = fits if fits.parents is None else fits.main_path(self.num_levels)
        return min(len(path.token_ids), self.num_levels)


@dataclass(eq=False, slots=True)
class ActiveLink:
    """A connected link: its sequences by wire ID, its pending messages, and its proposal times."""

    link: Link
    costs: LinkCosts
    model: str = ""  # draft model of the worker
    expected_round_trip: float | None = None  # seconds, estimated from its place; None: unknown
    sequences: dict[int, SpeculativeSequence] = field(default_factory=dict)
    request: SpeculateRequest = field(default_factory=SpeculateRequest)
    has_proposed: bool = False  # whether it drafts for any sequence
    credit: int | None = None  # tokens of new sequences that the worker has room for; None: unknown
    max_tokens_read: int | None = None  # tokens of a new sequence that need room, before its drafts; None: all
    owes_since: float | None = None  # when the oldest outstanding proposal was requested; reset by any reply
    late_since: float | None = None  # when a proposal first was late; reset by any reply
    num_ready: list[int] = field(default_factory=list)  # requested levels that were ready, per sequence and step
    num_asked: list[int] = field(default_factory=list)  # requested levels, per sequence and step
    observed: list[tuple[float, DraftStep]] = field(default_factory=list)  # replies that `costs` has yet to learn from
    num_ejections: int = 0
    ejected_until: float = 0.0
    tried_at: int = 0  # number of the link's last trial, counted over all links

    @property
    def is_guessed(self) -> bool:
        """True if only the worker's place predicts its round trip: no measurements, and no sequences yet."""
        return self.expected_round_trip is not None and not self.costs.is_known and not self.sequences

    def room_for(self, num_tokens: int, window: int) -> int:
        """Returns the credit that a new sequence of `num_tokens` tokens with `window` drafts takes."""
        return window + (num_tokens if self.max_tokens_read is None else min(num_tokens, self.max_tokens_read))

    def send(self) -> None:
        """Sends the pending messages, if any."""
        if self.request:
            self.link.send(self.request)
            self.request = SpeculateRequest()

    def was_late(self, now: float) -> None:
        """Records that a step gave up waiting for one of the worker's proposals."""
        self.late_since = self.late_since or now

    def heard(self, reply: SpeculateReply, answer_seconds: float) -> None:
        """Updates the link from `reply`, except for the proposals, which the caller handles.

        `answer_seconds`: time between the link's last message and the reply.
        """
        self.owes_since = self.late_since = None
        self.credit, self.max_tokens_read = reply.credit, reply.max_tokens_read
        self.has_proposed = self.has_proposed or bool(reply.proposals)
        if reply.timing is not None:
            timing = reply.timing
            step = DraftStep(timing.step_seconds, timing.batch, timing.rows or timing.batch, timing.is_first)
            # If the worker held the reply for longer than `answer_seconds`, the reply crossed the last message.
            if answer_seconds >= timing.held_seconds or not self.costs.is_known:
                self.observed.append((answer_seconds - timing.held_seconds, step))
            if not self.costs.is_known:
                self.learn()

    def learn(self) -> None:
        """Learns proposal times from the replies since the last call."""
        for overhead_seconds, step in self.observed:
            self.costs.observe_reply(overhead_seconds, step)
        if self.num_asked:
            self.costs.observe_ready(self.num_ready, self.num_asked)
        for learned in (self.observed, self.num_ready, self.num_asked):
            learned.clear()


class Round(NamedTuple):
    """The drafts that a step verified for a sequence, and the tokens that it chose."""

    sequence: SpeculativeSequence
    drafts: Drafts = NO_DRAFTS  # drafts that were verified
    chosen: Sequence[int] = ()  # the accepted drafts and the bonus token
