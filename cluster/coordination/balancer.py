"""Assigns sequences to draft workers: the most valuable worker for each sequence, with few moves.

The value of a worker (`link_value.py`) is the tokens per second that the target would reach with its drafts. It is
computed from the worker's round trip, its speed, and the acceptance of its model. Until the round trip is measured, it
is estimated from the worker's place.

Some sequences are assigned elsewhere to measure other workers: one to each unmeasured worker, one to each worker whose
draft model is unmeasured and may be as good as the best, and a configured share to the other draft models.

A worker that stops answering is *ejected*: its sequences move, and it gets none during a pause that doubles each time.
At most half of the workers are ejected at once, and never the only one, because slow proposals are better than none. If
a worker answers, but another worker would be more valuable, some of its sequences move to that worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

from cluster.coordination.base import Link
from cluster.coordination.link_value import LinkValue
from cluster.coordination.sequence import ActiveLink, SpeculativeSequence
from cluster.placement.rendezvous import rendezvous_rank, within_bound
from cluster.speculation.costs import LinkCosts
from cluster.telemetry.metrics import Reading

_SILENT_TIMEOUTS = 5.0  # silence, in draft timeouts, after which a worker that owes proposals is ejected
_EJECT_SECONDS = 2.0
_MAX_EJECT_SECONDS = 60.0
_ALIKE = 1.03  # workers share the sequences evenly if the best value is at most this many times theirs
_WORSE = 1.1  # sequences leave a worker if another worker is at least this many times as valuable
_BALANCE_SECONDS = 1.0
_SETTLE_SECONDS = 5.0  # minimum time that a moved sequence stays with its worker


class LinkBalancer:
    """Assigns sequences to the links in `active`. A link must be in `active` only while it is up."""

    def __init__(self, max_batch: int, draft_timeout_seconds: float, link_value: LinkValue, trial_share: float) -> None:
        self.active: dict[Link, ActiveLink] = {}
        self._models: WeakKeyDictionary[Link, str] = WeakKeyDictionary()  # draft model of each link's worker
        self.num_ejections = 0
        self.num_moves = 0
        self.num_trials = 0
        self._link_value = link_value
        self._trial_share = trial_share
        self._timeout = draft_timeout_seconds
        self._silent_seconds = _SILENT_TIMEOUTS * draft_timeout_seconds
        self._max_batch, self._max_depth = max_batch, link_value.max_depth
        self._balance_at = 0.0
        self._settled_at: dict[SpeculativeSequence, float] = {}
        self._going: dict[SpeculativeSequence, ActiveLink] = {}  # sequences that move, and the links they move to
        self._trials_due = 0.0
        self._num_choices = 0  # choices since the last check for sequences to move

    def add(self, link: Link) -> str:
        """Adds `link`, which came up. Returns the draft model that its worker had before, or the first one."""
        self.active[link] = ActiveLink(link, self._new_costs(link), link.model, link.expected_round_trip)
        replaced = self._models.get(link, link.model)
        self._models[link] = link.model
        return replaced

    def remove(self, link: Link) -> ActiveLink | None:
        return self.active.pop(link, None)

    def best(self, temperature: float, now: float) -> ActiveLink | None:
        """Returns the link that a sequence without one would probably get; None while no link is up."""
        links = self._usable(list(self.active.values()), now)
        if len(links) < 2:
            return links[0] if links else None
        return max(links, key=lambda link: self._link_value_of(link, temperature, 1))

    def choose(self, sequence: SpeculativeSequence, num_tokens: int, window: int, now: float) -> ActiveLink | None:
        """Returns the link to open `sequence` on; None if no link that is up has room for its tokens and drafts."""
        links = self.active.values()
        with_room = [link for link in links if link.credit is None or link.credit >= link.room_for(num_tokens, window)]
        candidates = self._usable(with_room, now)
        going_to = self._going.pop(sequence, None)
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        if going_to in candidates:
            return going_to
        temperature = sequence.params.temperature
        values = {link: self._link_value_of(link, temperature, 1) for link in candidates}
        measured = self._measured(candidates)
        best = max(measured, key=values.__getitem__)
        alike = [link for link in measured if _ALIKE * values[link] >= values[best]]
        promising = [link for link in candidates if link not in measured and _WORSE * values[link] >= values[best]]
        self._num_choices += 1
        self._trials_due += self._trial_share
        tried = self._to_try(candidates, alike, promising)
        if tried is not None:
            if tried not in promising:  # otherwise it leaves as soon as its drafts turn out to be worse
                self._settled_at[sequence] = now + _SETTLE_SECONDS
            return tried
        if not sequence.conversation:
            return min(alike, key=lambda link: len(link.sequences))
        # The same worker drafts for all turns of a conversation, whichever target serves them: it has their KV.
        alike = within_bound(alike, lambda link: len(link.sequences))
        return max(alike, key=lambda link: rendezvous_rank(sequence.conversation, link.link.address))

    def _to_try(
        self, candidates: Sequence[ActiveLink], alike: Sequence[ActiveLink], promising: Sequence[ActiveLink]
    ) -> ActiveLink | None:
        """Returns a link to measure although those in `alike` are more valuable; None if no trial is due.

        An unmeasured link is tried as soon as another link has sequences, and so is one in `promising`, whose draft
        model is unmeasured.
        """
        others = [link for link in candidates if link not in alike and not link.sequences]
        unknown = [link for link in others if link in promising or not link.costs.is_known]
        if unknown and any(link.sequences for link in self.active.values()):
            self.num_trials += 1
            return unknown[0]
        models = {link.model for link in alike}
        other_models = [link for link in others if link.model not in models]
        if not other_models:
            self._trials_due = min(self._trials_due, 1.0)
            return None
        if self._trials_due < 1.0:
            return None
        self._trials_due -= 1.0
        self.num_trials += 1
        tried = min(other_models, key=lambda link: link.tried_at)
        tried.tried_at = self.num_trials
        return tried

    def to_rearrange(self, now: float) -> list[SpeculativeSequence]:
        """Returns sequences that should leave their draft workers.

        A sequence leaves because its worker is silent, because another worker is more valuable, or for a trial.
        """
        if len(self.active) < 2:
            return []
        ejected = [sequence for link in self.to_eject(now) for sequence in link.sequences.values()]
        return [*ejected, *self.to_move(now)]

    def to_eject(self, now: float) -> list[ActiveLink]:
        """Ejects the links whose workers owe proposals and are silent. Returns the ejected links."""
        ejected = []
        for link in self.active.values():
            if link.late_since is None and (self._owes_first_answers(link, now) or self._owes_answers(link, now)):
                link.was_late(now)
            if link.late_since is None or now < link.late_since + self._silent_seconds:
                continue
            num_out = sum(other.ejected_until > now for other in self.active.values())
            if 2 * (num_out + 1) > len(self.active):
                break
            link.owes_since = link.late_since = None
            link.ejected_until = now + min(_EJECT_SECONDS * 2**link.num_ejections, _MAX_EJECT_SECONDS)
            link.num_ejections += 1
            link.costs = self._new_costs(link.link)  # the worker's costs may be different when it returns
            link.observed.clear()
            self.num_ejections += 1
            ejected.append(link)
        return ejected

    def _new_costs(self, link: Link) -> LinkCosts:
        return LinkCosts(self._max_batch, self._max_depth, is_one_pass=link.is_one_pass)

    def _owes_first_answers(self, link: ActiveLink, now: float) -> bool:
        """Returns True if the first answer for a sequence is overdue.

        Steps rarely wait for first answers, so `Waits` does not report their links as late.
        """
        limit = now - self._timeout
        return any(
            s.is_late and not s.has_answered and s.awaited_since is not None and s.awaited_since <= limit
            for s in link.sequences.values()
        )

    def _owes_answers(self, link: ActiveLink, now: float) -> bool:
        """Returns True if a proposal is overdue, even if no step has waited for it."""
        is_late = link.owes_since is not None and link.owes_since <= now - self._timeout
        return is_late and any(s.has_answered and s.awaited_since is not None for s in link.sequences.values())

    def to_move(self, now: float) -> list[SpeculativeSequence]:
        """Returns sequences to move to another worker; empty if the last check was less than a second ago.

        If another worker is clearly more valuable than the worst one, returns half of the worst worker's sequences.
        Otherwise returns one sequence for a trial, if one is due.
        """
        if now < self._balance_at or len(self.active) < 2:
            return []
        self._balance_at = now + _BALANCE_SECONDS
        self._settled_at = {s: at for s, at in self._settled_at.items() if s.link is not None and at > now}
        self._going.clear()
        usable = [link for link in self.active.values() if link.ejected_until <= now]
        loaded = [link for link in usable if link.costs.is_known and link.sequences]
        if not loaded or len(usable) < 2:
            return []
        temperature = next(iter(loaded[0].sequences.values())).params.temperature
        values = {link: self._link_value_of(link, temperature) for link in loaded}
        worst = min(loaded, key=values.__getitem__)
        number = -(-len(worst.sequences) // 2)
        best = max(
            (link for link in self._measured(usable) if link is not worst and (link.costs.is_known or link.is_guessed)),
            key=lambda link: self._link_value_of(link, temperature, number),
            default=None,
        )
        if best is not None and self._link_value_of(best, temperature, number) >= _WORSE * values[worst]:
            # The value of an unmeasured worker is estimated from its place: one sequence measures it first.
            return self._send(worst, best, number if best.costs.is_known else 1, now)
        return self._trial(usable, values, now)

    def _trial(
        self, usable: Sequence[ActiveLink], values: dict[ActiveLink, float], now: float
    ) -> list[SpeculativeSequence]:
        """Returns one sequence to move for a trial; an empty list if no trial is due.

        While sequences are long, new ones that could try a worker are rare, so a running sequence moves.
        """
        num_sequences = sum(len(link.sequences) for link in usable)
        if not self._num_choices:
            self._trials_due += self._trial_share * num_sequences * _BALANCE_SECONDS / _SETTLE_SECONDS
        self._num_choices = 0
        best = max(values, key=values.__getitem__)
        if num_sequences < 2:
            return []
        tried = self._to_try(usable, [best], ())
        return [] if tried is None else self._send(best, tried, 1, now)

    def _send(self, link: ActiveLink, to: ActiveLink, number: int, now: float) -> list[SpeculativeSequence]:
        movable = [s for s in link.sequences.values() if self._settled_at.get(s, 0.0) <= now]
        for sequence in movable[:number]:
            self._settled_at[sequence] = now + _SETTLE_SECONDS
            self._going[sequence] = to
        self.num_moves += len(movable[:number])
        return movable[:number]

    def _measured(self, links: Sequence[ActiveLink]) -> Sequence[ActiveLink]:
        """Returns those of `links` whose draft model's acceptance is measured; all of them if none is."""
        return [link for link in links if self._link_value.is_measured(link)] or links

    def _link_value_of(self, link: ActiveLink, temperature: float, num_more: int = 0) -> float:
        return self._link_value.of(link, self.active.values(), temperature, num_more)

    @staticmethod
    def _usable(links: list[ActiveLink], now: float) -> list[ActiveLink]:
        return [link for link in links if link.ejected_until <= now] or links

    def readings(self) -> Iterator[Reading]:
        ejected, moved = "Draft workers ejected for silence.", "Sequences moved to another draft worker."
        tried = "Sequences that tried a draft worker other than the best."
        yield Reading("outrider_ejections", ejected, self.num_ejections, is_counter=True)
        yield Reading("outrider_sequences_moved", moved, self.num_moves, is_counter=True)
        yield Reading("outrider_draft_trials", tried, self.num_trials, is_counter=True)
