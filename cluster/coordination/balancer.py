"""Which draft worker drafts for which sequence: the nearest and fastest there are, with as little moving as can be.

A worker that stops answering is *ejected*: its sequences go to others, and it gets none until a pause is over that
doubles each time. At most half of the workers are out at once, and never the only one: a slow proposal is worth more
than none. One that answers, but far slower than another would, hands a part of its sequences over.
"""

from __future__ import annotations

from collections.abc import Iterator

from cluster.coordination.link import DraftLink
from cluster.coordination.sequence import ActiveLink, SpeculativeSequence
from cluster.speculation.costs import LinkCosts
from cluster.telemetry.metrics import Reading

_SILENT_TIMEOUTS = 5.0  # draft timeouts without a word from a worker that owes proposals: it is ejected
_EJECT_SECONDS = 2.0
_MAX_EJECT_SECONDS = 60.0
_ALIKE = 1.25  # workers whose proposals take so little longer than the fastest's share the sequences evenly
_TOO_SLOW = 2.0  # a worker whose proposals take so much longer than elsewhere hands sequences over
_BALANCE_SECONDS = 1.0
_SETTLE_SECONDS = 5.0  # a sequence that was moved stays so long


class LinkBalancer:
    """`active` are the links that are up."""

    def __init__(self, max_batch: int, draft_timeout_seconds: float) -> None:
        self.active: dict[DraftLink, ActiveLink] = {}
        self.num_ejections = 0
        self.num_moves = 0
        self._silent_seconds = _SILENT_TIMEOUTS * draft_timeout_seconds
        self._max_batch = max_batch
        self._balance_at = 0.0
        self._settled_at: dict[SpeculativeSequence, float] = {}

    def add(self, link: DraftLink) -> None:
        self.active[link] = ActiveLink(link, LinkCosts(self._max_batch), link.model)

    def remove(self, link: DraftLink) -> ActiveLink | None:
        return self.active.pop(link, None)

    def best(self, now: float) -> ActiveLink | None:
        """What to reckon with for a sequence that has no link yet; None while no link is up."""
        return next(iter(self.active.values()), None)

    def choose(self, depth: int, num_tokens: int, now: float) -> ActiveLink | None:
        """Where a sequence of `num_tokens` tokens should be opened; None while no link that is up has room for it."""
        with_room = [link for link in self.active.values() if link.credit is None or link.credit >= num_tokens]
        candidates = [link for link in with_room if link.ejected_until <= now] or with_room
        if not candidates:
            return None
        seconds = {link: link.proposal_seconds(depth, 1) for link in candidates if link.costs.is_known}
        limit = _ALIKE * min(seconds.values(), default=0.0)
        # One that nothing is known of is as good as the best, until it shows otherwise.
        alike = [link for link in candidates if seconds.get(link, 0.0) <= limit]
        return min(alike, key=lambda link: len(link.sequences))

    def to_rearrange(self, depth: int, now: float) -> list[SpeculativeSequence]:
        """Sequences that should leave their draft workers: those are silent, or far slower than others.

        `depth` is that of the proposals by which workers are compared.
        """
        if len(self.active) < 2:
            return []
        ejected = [sequence for link in self.to_eject(now) for sequence in link.sequences.values()]
        return [*ejected, *self.to_move(depth, now)]

    def to_eject(self, now: float) -> list[ActiveLink]:
        """Links whose workers owe proposals and say nothing; from now on they are ejected."""
        ejected = []
        for link in self.active.values():
            if link.late_since is None or now < link.late_since + self._silent_seconds:
                continue
            num_out = sum(other.ejected_until > now for other in self.active.values())
            if 2 * (num_out + 1) > len(self.active):
                break
            link.late_since = None
            link.ejected_until = now + min(_EJECT_SECONDS * 2**link.num_ejections, _MAX_EJECT_SECONDS)
            link.num_ejections += 1
            link.costs = LinkCosts(self._max_batch)  # what it took before says nothing of what it will take then
            self.num_ejections += 1
            ejected.append(link)
        return ejected

    def to_move(self, depth: int, now: float) -> list[SpeculativeSequence]:
        """Sequences that would be drafted for much faster elsewhere: once a second, half of the slowest worker's."""
        if now < self._balance_at or len(self.active) < 2:
            return []
        self._balance_at = now + _BALANCE_SECONDS
        self._settled_at = {s: at for s, at in self._settled_at.items() if s.link is not None}
        known = [link for link in self.active.values() if link.costs.is_known and link.ejected_until <= now]
        loaded = [link for link in known if link.sequences]
        if not loaded:
            return []
        slowest = max(loaded, key=lambda link: link.proposal_seconds(depth))
        number = -(-len(slowest.sequences) // 2)
        others = [link.proposal_seconds(depth, number) for link in known if link is not slowest]
        if not others or slowest.proposal_seconds(depth) < _TOO_SLOW * min(others):
            return []
        movable = [s for s in slowest.sequences.values() if self._settled_at.get(s, 0.0) <= now][:number]
        for sequence in movable:
            self._settled_at[sequence] = now + _SETTLE_SECONDS
        self.num_moves += len(movable)
        return movable

    def readings(self) -> Iterator[Reading]:
        ejected, moved = "Draft workers that were ejected for silence.", "Sequences moved from a slow draft worker."
        yield Reading("outrider_ejections", ejected, self.num_ejections, is_counter=True)
        yield Reading("outrider_sequences_moved", moved, self.num_moves, is_counter=True)
