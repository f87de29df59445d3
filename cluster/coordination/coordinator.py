"""Runs the rounds of one target replica's sequences against the draft pool.

The engine's thread calls, once a step:

    coordinator.flush(decoding)           # depths for the next round; at most one message a link
    coordinator.wait(decoding)            # until their proposals are here, or the draft timeout is over
    coordinator.drafts(decoding)          # what to verify
    coordinator.commit(rounds)            # after the step: their token_ids have grown
    coordinator.observe_step(...)         # what it took

A sequence without drafts decodes plainly. Nothing here can change a token: drafts are only ever compared with the
target's choices.

What runs here once for each sequence and step is kept short, at the price of some loops that do what a method of the
sequence could say: with 256 sequences a microsecond is a quarter of a millisecond.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from cluster.config import SpeculationConfig
from cluster.coordination.link import DraftLink, LinkState
from cluster.coordination.openings import Openings
from cluster.coordination.planner import DepthPlanner
from cluster.coordination.pool import DraftPool
from cluster.coordination.sequence import Round, SpeculativeSequence
from cluster.coordination.spread import Spread
from cluster.coordination.stats import CoordinatorStats
from cluster.coordination.waiting import Waits
from cluster.speculation.drafts import Drafts
from cluster.speculation.tree import num_levels
from cluster.wire.messages import Advance, Proposal, SpeculateReply, SpeculateRequest

NO_DRAFTS = Drafts()


class Coordinator:
    """See the module. Not thread-safe: it belongs to the engine's thread."""

    def __init__(
        self,
        pool: DraftPool,
        config: SpeculationConfig,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_num_seqs: int = 64,
        max_num_rows: int = 512,
    ) -> None:
        timeout_seconds = config.draft_timeout_ms / 1e3
        self.stats = CoordinatorStats()
        self.planner = DepthPlanner(config, max_num_rows, clock)
        self.spread = Spread(max_num_seqs, timeout_seconds)
        self._pool = pool
        self._vocab_size = vocab_size
        self._clock = clock
        self._links = self.spread.uses
        self._openings = Openings(config, self.planner, self.spread, self.stats, clock)
        self._waits = Waits(self.planner, self.spread, self.stats, timeout_seconds, clock, self._take_events)
        self._committed: list[SpeculativeSequence] = []  # since the last flush

    def open(self, sequence: SpeculativeSequence) -> None:
        """Starts drafting for `sequence`; for one that asked for k = 0 it never does.

        A sequence that the engine preempted stays open: what was proposed for it still fits when it runs again, and
        nobody waits for it meanwhile. There are never more open sequences than may run at once, as the engine
        admits no other before it. Opening it again changes nothing.
        """
        if sequence.num_speculative_tokens == 0 or sequence.link is not None or sequence in self._openings.waiting:
            return
        self._openings.add(sequence)

    def close(self, sequence: SpeculativeSequence) -> None:
        self._openings.remove(sequence)

    def flush(self, decoding: Sequence[SpeculativeSequence] = (), num_joining: int = 0) -> None:
        """Sends what is waiting, one message a link, and gives sequences without a drafter one.

        `decoding` are the sequences whose next token the next step chooses; `num_joining` more will soon be among
        them, and depths are chosen for all.
        """
        started_at = time.thread_time()
        self._take_events()  # a link that came up since the last step takes the new sequences at once
        self._openings.rearrange()
        num_rows = len(decoding) + num_joining
        if self.planner.begin_step(num_rows):
            now = self._clock()
            planned = [s for s in decoding if s.link is not None or self._openings.may_open(s, now)]
            self.planner.plan(planned, {link: use.costs for link, use in self._links.items()}, num_rows)
        if self._committed:
            self._advance_committed()
        self._openings.assign()
        for link, use in self._links.items():
            if use.request:
                link.send(use.request)
                use.request = SpeculateRequest()
        self.stats.seconds += time.thread_time() - started_at

    def wait(self, sequences: Sequence[SpeculativeSequence]) -> Sequence[SpeculativeSequence]:
        """Waits until the proposals of `sequences` that are awaited are here, at most the draft timeout each.

        Returns those of them that the next step had better leave out: the others are worth more than the wait.
        """
        started_at = time.thread_time()
        self._take_events()
        held_back = () if self.planner.is_probing else self._waits.wait(sequences)
        self.stats.seconds += time.thread_time() - started_at
        return held_back

    def drafts(self, sequences: Sequence[SpeculativeSequence]) -> list[Drafts]:
        """What to verify after the committed tokens of each: the part of the last proposal that still fits."""
        started_at = time.thread_time()
        depths, drafts, is_probing = self.stats.depths, [], self.planner.is_probing
        for sequence in sequences:
            proposal, depth = sequence.proposal, sequence.depth
            depths[depth] += 1
            if (
                proposal is not None
                and proposal.base == len(sequence.token_ids)
                and 0 < len(proposal.token_ids) <= depth
                and not is_probing
            ):  # nearly always
                drafts.append(Drafts(proposal.token_ids, proposal.parents))
            else:
                own = self._fitting_drafts(sequence)
                if not own.token_ids:
                    self.stats.plain_decodes[self._why_plain(sequence)] += 1
                drafts.append(own)
        if max(chain.from_iterable([own.token_ids for own in drafts]), default=0) >= self._vocab_size:
            drafts = [self._valid(own) for own in drafts]
        self.stats.seconds += time.thread_time() - started_at
        return drafts

    def _why_plain(self, sequence: SpeculativeSequence) -> str:
        if sequence.num_speculative_tokens == 0:
            return "asked"
        if self.planner.is_probing:
            return "probe"
        if sequence.depth == 0:
            return "does_not_pay"
        if sequence.link is None:
            return "refused" if sequence.num_refusals else "no_draft_worker"
        return "late" if sequence.is_late else "no_fitting_draft"

    def _fitting_drafts(self, sequence: SpeculativeSequence) -> Drafts:
        depth = self.planner.verified_depth(sequence)
        if sequence.proposal is None or depth == 0:
            return NO_DRAFTS
        drafts = sequence.what_fits(sequence.proposal)
        if drafts is None:
            sequence.proposal = None
            return NO_DRAFTS
        return drafts.first(depth)

    def _valid(self, drafts: Drafts) -> Drafts:
        valid = drafts.below(self._vocab_size)
        self.stats.num_invalid_token_ids += len(drafts) - len(valid)
        if drafts and not valid:
            self.stats.plain_decodes["no_fitting_draft"] += 1
        return valid

    def commit(self, rounds: Sequence[Round]) -> None:
        """Takes in what a step committed, of which drafters are told at the next flush."""
        started_at = time.thread_time()
        self.planner.observe_rounds(rounds)
        self._committed += [entry.sequence for entry in rounds]
        self.stats.seconds += time.thread_time() - started_at

    def observe_step(self, num_rows: int, seconds: float) -> None:
        """A step without prefill, of `num_rows` rows, took `seconds`, waiting apart."""
        started_at = time.thread_time()
        self.planner.observe_step(num_rows, seconds)
        self.stats.seconds += time.thread_time() - started_at

    def _advance_committed(self) -> None:
        """Asks for the next proposals of the sequences that have committed."""
        now, has_trees, links = self._clock(), self.planner.trees.may_branch, self._links
        for sequence in self._committed:
            if sequence.link is None:
                continue
            use, depth, token_ids = links[sequence.link], sequence.depth, sequence.token_ids
            if depth >= sequence.max_len - len(token_ids):
                depth = sequence.useful_depth
            shape = None
            if sequence.is_shadow:
                depth = self.planner.asked_depth(sequence, use.costs)
            elif depth > 0:
                sequence.num_levels = depth
                if has_trees:
                    shape = self.planner.shape(sequence, depth, use.costs)
                    sequence.num_levels = num_levels(shape, depth)
                use.num_owed += 1
                if sequence.num_levels > use.depth_owed:
                    use.depth_owed = sequence.num_levels
            if depth == 0:
                sequence.awaited_since, sequence.is_late = None, False
                continue
            name, known = sequence.name, sequence.acknowledged
            use.request.advances[name] = Advance(name, known, token_ids[known:], depth, shape)
            if not sequence.is_late:
                sequence.awaited_since = now
        self._committed.clear()

    def _take_events(self, timeout: float = 0.0) -> None:
        for happened in self._pool.poll(timeout):
            if isinstance(happened.event, SpeculateReply):
                self._take_reply(happened.link, happened.event, happened.answer_seconds)
            elif happened.event is LinkState.UP:
                self.spread.add(happened.link)
            else:
                use = self.spread.remove(happened.link)
                for sequence in use.sequences.values() if use is not None else ():
                    self._openings.unassign(sequence)

    def _take_reply(self, link: DraftLink, reply: SpeculateReply, answer_seconds: float) -> None:
        use = self._links.get(link)
        if use is None:
            return
        use.late_since = None
        use.credit = reply.credit
        if reply.timing is not None:
            held, step, batch = reply.timing.held_seconds, reply.timing.step_seconds, reply.timing.batch
            use.costs.observe_reply(answer_seconds, held, step, batch)
        sequences = use.sequences
        for name, proposal in reply.proposals.items():
            sequence = sequences.get(name)
            if sequence is None:
                continue  # closed meanwhile
            base = proposal.base
            if base == len(sequence.token_ids) and len(proposal.token_ids) <= sequence.window:
                # Nearly always, and what `_take_proposal` comes to.
                sequence.proposal, sequence.acknowledged = proposal, base
                sequence.awaited_since, sequence.is_late, sequence.num_refusals = None, False, 0
            else:
                self._take_proposal(sequence, proposal)
        if reply.lost or reply.refused:
            self._openings.turn_away(use, reply)

    def _take_proposal(self, sequence: SpeculativeSequence, proposal: Proposal) -> None:
        base, num_tokens = proposal.base, len(sequence.token_ids)
        if not sequence.acknowledged <= base <= num_tokens:
            self.stats.num_stale_proposals += 1
            return
        num_excess = len(proposal.token_ids) - sequence.window
        if num_excess > 0:
            self.stats.num_excess_token_ids += num_excess
            drafts = proposal.drafts.first(sequence.window)
            proposal = replace(proposal, token_ids=drafts.token_ids, parents=drafts.parents)
        if base == num_tokens or sequence.is_shadow or sequence.what_fits(proposal) is not None:
            sequence.proposal = proposal
        else:
            self.stats.num_stale_proposals += 1
        sequence.acknowledged = base
        sequence.num_refusals = 0
        if base == num_tokens:
            sequence.awaited_since = None
        elif sequence.is_late:
            # The drafter lives but trails behind: what it was told since gets a budget of its own.
            sequence.awaited_since = self._clock()
        sequence.is_late = False
