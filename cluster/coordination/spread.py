"""Which draft worker drafts for which sequence: the nearest and fastest there are, with as little moving as can be.

A worker that stops answering is *ejected*: its sequences go to others, and it gets none until a pause is over that
doubles each time. At most half of the workers are out at once, and never the only one: a slow proposal is worth more
than none. One that answers, but far slower than another would, hands a part of its sequences over.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.coordination.link import DraftLink
from cluster.coordination.sequence import SpeculativeSequence
from cluster.speculation.costs import LinkCosts
from cluster.wire.messages import SpeculateRequest

_SILENT_TIMEOUTS = 5.0  # draft timeouts without a word from a worker that owes proposals: it is ejected
_EJECT_SECONDS = 2.0
_MAX_EJECT_SECONDS = 60.0
_ALIKE = 1.25  # workers whose proposals take so little longer than the fastest's share the sequences evenly
_TOO_SLOW = 2.0  # a worker whose proposals take so much longer than elsewhere hands sequences over
_BALANCE_SECONDS = 1.0
_SETTLE_SECONDS = 5.0  # a sequence that was moved stays so long


@dataclass(slots=True, eq=False)
class LinkUse:
    """A link that is up: its sequences by number, what is to be sent on it, and what its proposals take."""

    link: DraftLink
    costs: LinkCosts
    sequences: dict[int, SpeculativeSequence] = field(default_factory=dict)
    request: SpeculateRequest = field(default_factory=SpeculateRequest)
    late_since: float | None = None  # when a proposal was late, and nothing has come since
    num_ejections: int = 0
    ejected_until: float = 0.0
    credit: int | None = None  # tokens of new sequences there is room for, as far as is known
    num_owed: int = 0  # proposals that were asked for and no step has had yet, shadows' and first ones apart
    depth_owed: int = 0  # of the deepest of them

    def proposal_seconds(self, depth: int, num_more: int = 0) -> float:
        """What a proposal takes here when it has `num_more` sequences more. Something must be known."""
        return self.costs.proposal_seconds(depth, max(1, len(self.sequences) + num_more))


class Spread:
    """The links that are up."""

    def __init__(self, max_batch: int, draft_timeout_seconds: float) -> None:
        self.uses: dict[DraftLink, LinkUse] = {}
        self._silent_seconds = _SILENT_TIMEOUTS * draft_timeout_seconds
        self.num_ejections = 0
        self.num_moves = 0
        self._max_batch = max_batch
        self._balance_at = 0.0
        self._settled_at: dict[SpeculativeSequence, float] = {}

    def add(self, link: DraftLink) -> None:
        self.uses[link] = LinkUse(link, LinkCosts(self._max_batch))

    def remove(self, link: DraftLink) -> LinkUse | None:
        return self.uses.pop(link, None)

    def choose(self, depth: int, num_tokens: int, now: float) -> LinkUse | None:
        """Where a sequence of `num_tokens` tokens should be opened; None while no link that is up has room for it."""
        with_room = [use for use in self.uses.values() if use.credit is None or use.credit >= num_tokens]
        candidates = [use for use in with_room if use.ejected_until <= now] or with_room
        if not candidates:
            return None
        seconds = {use: use.proposal_seconds(depth, 1) for use in candidates if use.costs.is_known}
        limit = _ALIKE * min(seconds.values(), default=0.0)
        # One that nothing is known of is as good as the best, until it shows otherwise.
        alike = [use for use in candidates if seconds.get(use, 0.0) <= limit]
        return min(alike, key=lambda use: len(use.sequences))

    def to_eject(self, now: float) -> list[LinkUse]:
        """Links whose workers owe proposals and say nothing; from now on they are ejected."""
        ejected = []
        for use in self.uses.values():
            if use.late_since is None or now < use.late_since + self._silent_seconds:
                continue
            num_out = sum(other.ejected_until > now for other in self.uses.values())
            if 2 * (num_out + 1) > len(self.uses):
                break
            use.late_since = None
            use.ejected_until = now + min(_EJECT_SECONDS * 2**use.num_ejections, _MAX_EJECT_SECONDS)
            use.num_ejections += 1
            use.costs = LinkCosts(self._max_batch)  # what it took before says nothing of what it will take then
            self.num_ejections += 1
            ejected.append(use)
        return ejected

    def to_move(self, depth: int, now: float) -> list[SpeculativeSequence]:
        """Sequences that would be drafted for much faster elsewhere: once a second, half of the slowest worker's."""
        if now < self._balance_at or len(self.uses) < 2:
            return []
        self._balance_at = now + _BALANCE_SECONDS
        self._settled_at = {s: at for s, at in self._settled_at.items() if s.link is not None}
        known = [use for use in self.uses.values() if use.costs.is_known and use.ejected_until <= now]
        loaded = [use for use in known if use.sequences]
        if not loaded:
            return []
        slowest = max(loaded, key=lambda use: use.proposal_seconds(depth))
        number = -(-len(slowest.sequences) // 2)
        others = [use.proposal_seconds(depth, number) for use in known if use is not slowest]
        if not others or slowest.proposal_seconds(depth) < _TOO_SLOW * min(others):
            return []
        movable = [s for s in slowest.sequences.values() if self._settled_at.get(s, 0.0) <= now][:number]
        for sequence in movable:
            self._settled_at[sequence] = now + _SETTLE_SECONDS
        self.num_moves += len(movable)
        return movable
