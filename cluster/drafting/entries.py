"""State of a draft worker's links and of their sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

from cluster.drafters.base import DraftSequence
from cluster.drafting.context_tuning import ContextUse
from cluster.drafting.run_ahead import Frontier, RunAhead, runs_ahead, tree_nodes
from cluster.speculation.drafts import is_chain
from cluster.speculation.params import SamplingParams
from cluster.wire.messages import Proposal, SpeculateReply, Timing

# Learning rates of `CoordinatorLink.round_seconds`, after a longer and after a shorter round. The estimate is low on
# purpose: about four rounds in five take longer. If a draft step still runs when an outcome arrives, the target waits,
# which costs more than a draft worker that is idle until a late outcome.
_LONGER_RATE, _SHORTER_RATE = 0.03, 0.3
_LEAST_REST_SECONDS = 1e-4
_MAX_CHANGE = 2.0  # a round counts as at most this many times the estimate, because rounds with prompts take longer

Deliver = Callable[[SpeculateReply], None]
"Accepts a reply to a coordinator; never blocks."


@dataclass(slots=True)
class CoordinatorLink:
    """The reply channel of a link, and the times that are reported to its coordinator."""

    deliver: Deliver
    answered_at: float  # when the worker last sent a reply on the link
    received_at: float = 0.0  # when the last request arrived
    num_waiting_bytes: int = 0  # bytes of requests in the inbox
    step_seconds: float = 0.0  # duration of the last step with a sequence of this link
    batch: int = 0  # number of the link's sequences in that step
    rows: int = 0  # rows of these sequences in that step
    is_first: bool = False  # whether some of these sequences began a proposal in that step
    advanced_at: float | None = None  # when tokens were last committed
    round_seconds: float | None = None  # low estimate of the time between two commits; None: unknown

    def advanced(self, arrived_at: float) -> None:
        """Records a commit of tokens by a request that arrived at `arrived_at`."""
        if self.advanced_at is not None and arrived_at > self.advanced_at:
            seconds = arrived_at - self.advanced_at
            if self.round_seconds is None:
                self.round_seconds = seconds
            else:
                change = min(seconds, _MAX_CHANGE * self.round_seconds) - self.round_seconds
                self.round_seconds += (_LONGER_RATE if change > 0.0 else _SHORTER_RATE) * change
        self.advanced_at = arrived_at

    def outcome_in(self, now: float) -> tuple[float, float | None]:
        """Returns the seconds until the next outcome is expected, and the seconds until it is overdue by one round.

        Returns infinity and None if the outcome is overdue by more than a round, or if no round has been timed.
        """
        if self.advanced_at is None or self.round_seconds is None:
            return math.inf, None
        seconds = self.advanced_at + self.round_seconds - now
        until_overdue = seconds + self.round_seconds
        return (seconds, until_overdue) if until_overdue > _LEAST_REST_SECONDS else (math.inf, None)

    def timing(self, now: float) -> Timing:
        held_seconds = max(0.0, now - self.received_at)  # a request may have arrived after `now`, in its own thread
        return Timing(held_seconds, self.step_seconds, self.batch, self.rows, self.is_first)


@dataclass(eq=False, slots=True)
class Entry:
    """A sequence and its owed proposal."""

    wire_id: int  # the sequence's number on its link
    link: int
    sequence: DraftSequence
    granted_window: int  # number of drafts after the committed tokens that the coordinator allows for any k
    target_params: SamplingParams  # the drafter samples with these parameters except for the temperature
    takes_parts: bool  # whether the coordinator accepts proposals in parts
    exponent: int = 0  # draft temperature, as the exponent of its factor on the target's (`DraftTemperature`)
    num_rounds: int = 0  # rounds drafted with this exponent
    owes_proposal: bool = True
    lacks: list[int] | None = None  # nodes to extend before the proposal is complete; None: not determined yet
    sent: Sent = field(default_factory=lambda: Sent())
    frontier: Frontier | None = None  # None: has to be computed
    is_computed: bool = False  # whether the sequence has had drafts, so its prompt is computed
    # Whether a commit added more tokens than a round can, or the drafter began again, and no step has followed.
    is_behind: bool = False
    context: ContextUse | None = None  # the choice of `ContextTuning`

    def has_proposal(self, max_model_len: int) -> bool:
        """Returns True if the owed proposal is complete, or cannot grow further."""
        if self.lacks is None:
            self.lacks = [] if self.sequence.is_exhausted else self.sequence.missing(max_model_len)
        return not self.lacks

    def tested(self, news: Sequence[int]) -> tuple[int, int]:
        """Returns how many drafts of the proposal's main path `news` tests, and how many of these the target chose.

        `news`: committed tokens that the sequence does not have yet.
        """
        drafts = self.sequence.draft_token_ids[: self.sequence.proposal_depth]
        pairs = list(zip(drafts, news, strict=False))
        num_accepted = next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(pairs))
        return min(num_accepted + 1, len(pairs)), num_accepted

    @property
    def runs_ahead(self) -> bool:
        return runs_ahead(self.sequence)

    @property
    def has_news(self) -> bool:
        """True if the coordinator accepts parts and lacks some nodes."""
        return len(self.sequence.parents) > self.sent.num_seen and self._comes_in_parts

    @property
    def _comes_in_parts(self) -> bool:
        return self.takes_parts and self.runs_ahead and self.sequence.shape is None

    def ahead(self, run_ahead: RunAhead, max_depth: int, owed: Container[int]) -> Iterator[tuple[float, Entry, int]]:
        """Yields (probability that the node is needed, this entry, node) for nodes to extend ahead, likeliest first.

        Omits the nodes at `max_depth` and the nodes in `owed`.
        """
        if self.sequence.shape is not None:
            chances = tree_nodes(self.sequence, run_ahead)
            nodes = [*chances]
        else:
            if self.frontier is None:
                self.frontier = Frontier(self.sequence, run_ahead)
            self.frontier.follow()
            nodes, chances = self.frontier.nodes, self.frontier.chances
        for node in nodes:
            if node not in owed and self.sequence.depth(node) < max_depth:
                yield chances[node], self, node

    def proposal(self) -> Proposal:
        """Returns the owed proposal. A proposal in parts also includes all drafts beyond the owed ones."""
        if self._comes_in_parts:
            return self.news()
        drafts = self.sequence.proposal()
        return Proposal(self.wire_id, self.sequence.base, drafts.token_ids, drafts.parents)

    def news(self) -> Proposal:
        """Returns the nodes that were not sent to the coordinator yet."""
        start = self.sent.number
        token_ids, parents = self.sent.rest(self.sequence)
        drafts = None if is_chain(parents, start) else parents
        return Proposal(self.wire_id, self.sequence.base, token_ids, drafts, start, not self.owes_proposal)


class Sent:
    """Nodes of a sequence's tree that were sent to its coordinator and may be verified next."""

    def __init__(self) -> None:
        self.num_seen = 0  # nodes that were examined
        self._numbers = {-1: -1}  # for each sent node, its number in the coordinator's tree
        self._main = {-1}  # nodes of the main path

    @property
    def number(self) -> int:
        return len(self._numbers) - 1

    def rest(self, sequence: DraftSequence) -> tuple[list[int], list[int]]:
        """Returns the tokens and parents of the nodes that were not examined yet.

        A node off the main path, or beyond the bonus token, sends only its best child: this round cannot choose
        another.
        """
        token_ids: list[int] = []
        parents: list[int] = []
        numbers, main = self._numbers, self._main
        node, end = self.num_seen, len(sequence.parents)
        while node < end:
            parent = sequence.parents[node]
            siblings = sequence.children(parent)
            if parent in numbers:
                may_leave = parent in main and sequence.depth(parent) <= sequence.num_owed
                for child in siblings if may_leave else siblings[:1]:
                    parents.append(numbers[parent])
                    token_ids.append(sequence.token_of(child))
                    numbers[child] = len(numbers) - 1
                if parent in main:
                    main.add(node)
            node += len(siblings)
        self.num_seen = end
        return token_ids, parents
