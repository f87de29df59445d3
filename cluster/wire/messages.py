"""Messages between coordinator and draft worker, in the form that both sides use.

A message has at most one entry for each sequence. Messages that wait for the same link are merged. So a sender queues
at most one entry for each sequence, even if the link is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.speculation.drafts import Drafts, chain
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.tree import Shape


@dataclass(frozen=True, slots=True)
class Open:
    """A sequence to draft for, with every token committed so far."""

    wire_id: int  # the sequence's number on the link, never reused
    token_ids: Sequence[int]
    num_prompt_tokens: int
    params: SamplingParams
    noise_key: NoiseKey
    num_owed: int
    window: int
    shape: Shape | None = None  # shape of the owed tree; None: a chain of k
    cache_root: bytes = b""  # KV is shared only between sequences with the same root
    takes_parts: bool = False  # whether proposals may arrive in parts, before they are requested


@dataclass(slots=True)  # not frozen, like Proposal: one is made per sequence and step, and freezing doubles the time
class Advance:
    """Every token committed after the first `base` tokens. The drafter has already received these."""

    wire_id: int
    base: int
    token_ids: Sequence[int]
    num_owed: int
    shape: Shape | None = None


@dataclass(slots=True)
class Proposal:
    """Draft tokens that follow the first `base` tokens of a sequence; `parents` as in Drafts.

    With `start`, the tokens are a later part of a tree. The first `start` tokens of the tree were sent before, with the
    same base, and `parents` contains indices in the whole tree.
    """

    wire_id: int
    base: int
    token_ids: Sequence[int]
    parents: Sequence[int] | None = None
    start: int = 0
    is_whole: bool = True  # whether this and the earlier parts contain the whole requested proposal

    @property
    def drafts(self) -> Drafts:
        return Drafts(self.token_ids, self.parents)

    def grown(self, later: Proposal) -> Proposal | None:
        """Returns the proposal extended by `later`; None if `later` is not the next part of the same tree."""
        if later.base != self.base or later.start != self.start + len(self.token_ids):
            return None
        parents = None
        if self.parents is not None or later.parents is not None:
            parents = [*self._all_parents(), *later._all_parents()]
        token_ids = [*self.token_ids, *later.token_ids]
        return Proposal(self.wire_id, self.base, token_ids, parents, self.start, later.is_whole)

    def _all_parents(self) -> Sequence[int]:
        return chain(len(self.token_ids), self.start) if self.parents is None else self.parents


@dataclass(slots=True)
class SpeculateRequest:
    """A message from coordinator to draft worker; entries by wire ID."""

    opens: dict[int, Open] = field(default_factory=dict)
    advances: dict[int, Advance] = field(default_factory=dict)
    closes: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.opens or self.advances or self.closes)

    def merge(self, newer: SpeculateRequest) -> None:
        """Merges a later request into this one. Advances are cumulative, so a later advance replaces an earlier one."""
        self.opens |= newer.opens
        self.advances |= newer.advances
        self.closes |= newer.closes
        for wire_id in newer.closes:
            self.opens.pop(wire_id, None)
            self.advances.pop(wire_id, None)

    def take_part(self, max_tokens: int) -> SpeculateRequest:
        """Removes and returns the part to send first.

        The part consists of the oldest opening, the shortest other openings up to `max_tokens` tokens in total, all
        closes, and the advances of all sequences whose opening does not stay. Repeated calls remove everything.
        """
        first, *others = self.opens.values() if self.opens else (None,)
        openings = [] if first is None else [first]
        num_tokens = sum(len(opening.token_ids) for opening in openings)
        for opening in sorted(others, key=lambda opening: len(opening.token_ids)):
            num_tokens += len(opening.token_ids)
            if num_tokens > max_tokens:
                break
            openings.append(opening)
        opens = {opening.wire_id: self.opens.pop(opening.wire_id) for opening in openings}
        advances = {wire_id: advance for wire_id, advance in self.advances.items() if wire_id not in self.opens}
        for wire_id in advances:
            del self.advances[wire_id]
        closes, self.closes = self.closes, set()
        return SpeculateRequest(opens, advances, closes)


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations in the draft worker that a reply reports."""

    held_seconds: float  # time from the arrival of the link's last request to the reply
    step_seconds: float  # duration of the drafter's last step with a sequence of the link
    batch: int  # number of the link's sequences in that step
    rows: int = 0  # rows of these sequences; 0: one row each
    is_first: bool = False  # whether some of them had no drafts before, so that they had rows for committed tokens


@dataclass(slots=True)
class SpeculateReply:
    """A message from draft worker to coordinator; entries by wire ID."""

    proposals: dict[int, Proposal] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)  # unknown sequences, or sequences whose base is unknown
    refused: set[int] = field(default_factory=set)  # sequences that the worker has no room for
    timing: Timing | None = field(default=None, compare=False)  # not compared, because all timings differ
    credit: int | None = field(default=None, compare=False)  # tokens that the worker has room for; None: no limit
    max_tokens_read: int | None = field(default=None, compare=False)  # of a sequence, that need room; None: all

    def __bool__(self) -> bool:
        return bool(self.proposals or self.lost or self.refused)

    def add(self, proposal: Proposal) -> None:
        """Adds a proposal. It replaces an earlier proposal for its sequence, or extends it if it is the next part."""
        earlier = self.proposals.get(proposal.wire_id) if proposal.start else None
        grown = None if earlier is None else earlier.grown(proposal)
        self.proposals[proposal.wire_id] = grown or proposal

    def merge(self, newer: SpeculateReply) -> None:
        """Merges a later reply into this one."""
        for proposal in newer.proposals.values():
            self.add(proposal)
        self.lost |= newer.lost
        self.refused |= newer.refused
        self.timing = newer.timing or self.timing
        self.credit, self.max_tokens_read = newer.credit, newer.max_tokens_read
