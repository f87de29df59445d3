"""Runs the rounds of one target replica's sequences against the draft pool.

The engine's thread calls, once a step:

    coordinator.flush(decoding)           # depths for the next round; at most one message a link
    coordinator.wait(decoding)            # until their proposals are here, or the draft timeout is over
    coordinator.drafts(decoding)          # what to verify
    coordinator.commit(rounds)            # after the step: their token_ids have grown
    coordinator.observe_step(...)         # what it took

A sequence without drafts decodes plainly. Nothing here can change a token: drafts are only ever compared with the
target's choices.

What runs here once for each sequence and step is kept short: with 256 sequences a microsecond is a quarter of a
millisecond.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cluster.config import SpeculationConfig
from cluster.coordination.link import DraftLink, LinkState
from cluster.coordination.messages import Advance, Open, Proposal, SpeculateReply, SpeculateRequest
from cluster.coordination.planner import DepthPlanner
from cluster.coordination.pool import DraftPool
from cluster.coordination.sequence import SpeculativeSequence
from cluster.coordination.spread import LinkUse, Spread
from cluster.speculation.drafts import Drafts
from cluster.speculation.noise import NoiseDomain
from cluster.speculation.tree import Shape, depth_of

_REOPEN_SECONDS = 1.0  # a refused sequence is not opened again before; doubled with every refusal
_MAX_REOPEN_SECONDS = 60.0


@dataclass(slots=True)
class CoordinatorStats:
    """Counted since the start."""

    num_stale_proposals: int = 0  # the target had chosen otherwise, or gone past them, by the time they came
    num_late_rounds: int = 0  # a step that gave up waiting for a proposal
    num_invalid_token_ids: int = 0  # drafts outside the target's vocabulary
    num_excess_token_ids: int = 0  # drafts beyond the window they were granted
    num_refused: int = 0
    num_lost: int = 0
    num_without_credit: int = 0  # times that no draft worker had room for a sequence
    depths: Counter[int] = field(default_factory=Counter)  # of a sequence in a step, by what was wanted
    plain_decodes: Counter[str] = field(default_factory=Counter)  # of a sequence in a step, by reason
    seconds: float = 0.0  # of the processor, spent here by the engine's thread


class Round(NamedTuple):
    """One sequence's part of a step."""

    sequence: SpeculativeSequence
    drafts: Drafts = Drafts()  # that were verified
    chosen: Sequence[int] = ()  # what the target chose: the accepted drafts and the bonus token


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
        self.stats = CoordinatorStats()
        self.planner = DepthPlanner(config, max_num_rows, clock)
        self._pool = pool
        self._config = config
        self._vocab_size = vocab_size
        self._clock = clock
        self.spread = Spread(max_num_seqs, config.draft_timeout_ms / 1e3)
        self._links = self.spread.uses
        self._unassigned: dict[SpeculativeSequence, None] = {}  # in the order they came
        self._committed: dict[SpeculativeSequence, None] = {}  # since the last flush
        self._num_openings_ever = 0

    def open(self, sequence: SpeculativeSequence) -> None:
        """Starts drafting for `sequence`; for one that asked for k = 0 it never does.

        A sequence that the engine preempted stays open: what was proposed for it still fits when it runs again, and
        nobody waits for it meanwhile. There are never more open sequences than may run at once, as the engine
        admits no other before it. Opening it again changes nothing.
        """
        if sequence.num_speculative_tokens == 0 or sequence.link is not None or sequence in self._unassigned:
            return
        self.planner.open(sequence)
        sequence.window = self._config.window(sequence.num_speculative_tokens or self._config.max_speculative_tokens)
        self._unassigned[sequence] = None

    def close(self, sequence: SpeculativeSequence) -> None:
        self.planner.close(sequence)
        self._leave_link(sequence)
        self._unassigned.pop(sequence, None)

    def _leave_link(self, sequence: SpeculativeSequence) -> None:
        """Its drafter forgets `sequence`, which waits for another."""
        if sequence.link is not None:
            use = self._links[sequence.link]
            del use.sequences[sequence.name]
            use.credit = None  # its room is free, but how much that is only the worker knows
            use.request.merge(SpeculateRequest(closes={sequence.name}))
        self._unassign(sequence)

    def flush(self, decoding: Sequence[SpeculativeSequence] = (), num_joining: int = 0) -> None:
        """Sends what is waiting, one message a link, and gives sequences without a drafter one.

        `decoding` are the sequences whose next token the next step chooses; `num_joining` more will soon be among
        them, and depths are chosen for all.
        """
        started_at = time.thread_time()
        self._take_events()  # a link that came up since the last step takes the new sequences at once
        self._rearrange()
        planned: Sequence[SpeculativeSequence] = ()
        num_rows = len(decoding) + num_joining
        if self.planner.is_due(num_rows):
            now = self._clock()
            planned = [s for s in decoding if s.link is not None or (s in self._unassigned and s.may_open_at <= now)]
        self.planner.plan(planned, {link: use.costs for link, use in self._links.items()}, num_rows)
        self._advance_committed()
        if self._links and self._unassigned:
            self._assign()
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
        held_back = () if self.planner.is_probing else self._wait(sequences)
        self.stats.seconds += time.thread_time() - started_at
        return held_back

    def _wait(self, sequences: Sequence[SpeculativeSequence]) -> Sequence[SpeculativeSequence]:
        started_at = now = self._clock()
        timeout = self._config.draft_timeout_ms / 1e3
        expected = self._expected_from(sequences)
        awaited = [s for s in sequences if s.awaited_since is not None and not s.is_late and s.depth > 0]
        if awaited and self._should_go_on_without(sequences, awaited, now):
            return awaited
        while awaited:
            for sequence in awaited:
                assert sequence.awaited_since is not None
                if now >= sequence.awaited_since + timeout:
                    self._give_up(sequence, now)
            awaited = [s for s in awaited if s.is_awaited]
            if awaited:
                deadline = min(s.awaited_since for s in awaited if s.awaited_since is not None) + timeout
                self._take_events(deadline - now)
                now = self._clock()
                awaited = [s for s in awaited if s.is_awaited]
            self._learn_waits(expected, {s.link for s in awaited}, now - started_at)
        self._learn_waits(expected, set(), 0.0)
        return ()

    def _should_go_on_without(
        self, sequences: Sequence[SpeculativeSequence], awaited: Sequence[SpeculativeSequence], now: float
    ) -> bool:
        if len(awaited) == len(sequences):
            return False
        batches = Counter(s.link for s in awaited)
        to_wait = 0.0
        for sequence in awaited:
            assert sequence.link is not None
            assert sequence.awaited_since is not None
            costs = self._links[sequence.link].costs
            takes = costs.proposal_seconds(sequence.num_levels, batches[sequence.link])
            to_wait = max(to_wait, sequence.awaited_since + takes - now)
        ready = [s for s in sequences if not (s.depth > 0 and s.is_awaited)]
        return self.planner.should_go_on_without(ready, awaited, to_wait)

    def _learn_waits(
        self, expected: dict[DraftLink, tuple[int, int]], still_awaited: set[DraftLink | None], waited: float
    ) -> None:
        """The proposals of the links of `expected` that are not awaited any more took so long; takes them out."""
        for link in expected.keys() - still_awaited:
            depth, batch = expected.pop(link)
            if link in self._links:
                self._links[link].costs.observe_wait(waited, depth, batch)

    def _give_up(self, sequence: SpeculativeSequence, now: float) -> None:
        """No step waits for the proposal any more that `sequence` is owed."""
        sequence.is_late = True
        self.stats.num_late_rounds += 1
        if sequence.link is not None:
            use = self._links[sequence.link]
            use.late_since = use.late_since or now

    def drafts(self, sequences: Sequence[SpeculativeSequence]) -> list[Drafts]:
        """What to verify after the committed tokens of each: the part of the last proposal that still fits."""
        started_at = time.thread_time()
        depths, drafts = self.stats.depths, []
        for sequence in sequences:
            depths[sequence.depth] += 1
            own = NO_DRAFTS if sequence.proposal is None else self._fitting_drafts(sequence, sequence.proposal)
            if not own.token_ids:
                self.stats.plain_decodes[self._why_plain(sequence)] += 1
            drafts.append(own)
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

    def _fitting_drafts(self, sequence: SpeculativeSequence, proposal: Proposal) -> Drafts:
        depth = self.planner.verified_depth(sequence)
        if depth == 0:
            return NO_DRAFTS
        drafts = sequence.what_fits(proposal)
        if drafts is None:
            sequence.proposal = None
            return NO_DRAFTS
        if len(drafts.token_ids) > depth:
            drafts = drafts.first(depth)
        if max(drafts.token_ids, default=0) < self._vocab_size:
            return drafts
        valid = drafts.below(self._vocab_size)
        self.stats.num_invalid_token_ids += len(drafts) - len(valid)
        return valid

    def commit(self, rounds: Sequence[Round]) -> None:
        """Takes in what a step committed, of which drafters are told at the next flush."""
        started_at = time.thread_time()
        observe_round, trees = self.planner.observe_round, self.planner.trees
        self.planner.count_tokens(sum(len(chosen) for _, _, chosen in rounds))
        for sequence, drafts, chosen in rounds:
            if drafts.token_ids:
                if trees.may_branch:
                    trees.count(drafts, chosen)
                observe_round(sequence, *drafts.main_path_outcome(chosen))
            if sequence.is_shadow:
                self.planner.judge_shadow(sequence)
            if sequence.link is not None:
                self._committed[sequence] = None
        self.stats.seconds += time.thread_time() - started_at

    def observe_step(self, num_rows: int, seconds: float) -> None:
        """A step without prefill, of `num_rows` rows, took `seconds`, waiting apart."""
        started_at = time.thread_time()
        self.planner.observe_step(num_rows, seconds)
        self.stats.seconds += time.thread_time() - started_at

    def _advance_committed(self) -> None:
        """Asks for the next proposals of the sequences that have committed."""
        now = self._clock()
        for sequence in self._committed:
            assert sequence.link is not None
            use, depth = self._links[sequence.link], sequence.useful_depth
            if sequence.is_shadow:
                depth = self.planner.asked_depth(sequence, use.costs)
            if depth == 0:
                sequence.awaited_since, sequence.is_late = None, False
                continue
            name, known = sequence.name, sequence.acknowledged
            shape = self.planner.shape(sequence, depth, use.costs)
            sequence.num_levels = depth if shape is None else depth_of(shape)
            use.request.advances[name] = Advance(name, known, sequence.token_ids[known:], depth, shape)
            if not sequence.is_late:
                sequence.awaited_since = now
        self._committed.clear()

    def _expected_from(self, sequences: Sequence[SpeculativeSequence]) -> dict[DraftLink, tuple[int, int]]:
        """The depth and the number of the proposals that each link owes, or has sent already."""
        levels: dict[DraftLink, list[int]] = {}
        for sequence in sequences:
            link, num_levels = sequence.link, sequence.num_levels
            if link is not None and sequence.depth > 0 and num_levels > 0:
                if link not in levels:
                    levels[link] = []
                levels[link].append(num_levels)
        return {link: (max(own), len(own)) for link, own in levels.items()}

    def _rearrange(self) -> None:
        """Takes sequences from draft workers that are silent, or far slower than others."""
        now, depth = self._clock(), max(1, self.planner.opening_depth)
        ejected = [s for use in self.spread.to_eject(now) for s in use.sequences.values()]
        for sequence in [*ejected, *self.spread.to_move(depth, now)]:
            self._leave_link(sequence)

    def _assign(self) -> None:
        """Opens the sequences that want drafts."""
        now = self._clock()
        for sequence in [s for s in self._unassigned if s.may_open_at <= now and (s.depth > 0 or s.is_shadow)]:
            num_tokens = len(sequence.token_ids) + self._config.window(sequence.depth)
            use = self.spread.choose(max(1, sequence.depth), num_tokens, now)
            if use is None:
                sequence.may_open_at = now + _REOPEN_SECONDS
                self.stats.num_without_credit += 1
                continue
            del self._unassigned[sequence]
            if use.credit is not None:
                use.credit -= num_tokens
            self._open_on(use, sequence, now)

    def _open_on(self, use: LinkUse, sequence: SpeculativeSequence, now: float) -> None:
        # A number that was used before could still be spoken of by a reply that is on its way.
        self._num_openings_ever += 1
        sequence.name = self._num_openings_ever
        use.sequences[sequence.name] = sequence
        sequence.link = use.link
        depth = sequence.depth or self.planner.asked_depth(sequence, use.costs)
        shape = self.planner.shape(sequence, depth, use.costs)
        sequence.num_levels = depth if shape is None else depth_of(shape)
        use.request.opens[sequence.name] = self._opening(sequence, depth, shape)
        sequence.acknowledged = len(sequence.token_ids)
        sequence.awaited_since, sequence.is_late = now, False

    def _opening(self, sequence: SpeculativeSequence, depth: int, shape: Shape | None) -> Open:
        params, noise_key = sequence.params, sequence.noise_key
        if self._config.acceptance == "greedy":
            params = replace(params, temperature=0.0)
        elif self._config.acceptance == "rejection":
            noise_key = noise_key.within(NoiseDomain.DRAFT)  # a rejection must not be decided by what it rejects
        return Open(
            sequence.name,
            list(sequence.token_ids),
            sequence.num_prompt_tokens,
            params,
            noise_key,
            depth,
            self._config.granted_window,
            shape,
        )

    def _take_events(self, timeout: float = 0.0) -> None:
        for happened in self._pool.poll(timeout):
            if isinstance(happened.event, SpeculateReply):
                self._take_reply(happened.link, happened.event, happened.answer_seconds)
            elif happened.event is LinkState.UP:
                self.spread.add(happened.link)
            else:
                use = self.spread.remove(happened.link)
                for sequence in use.sequences.values() if use is not None else ():
                    self._unassign(sequence)

    def _take_reply(self, link: DraftLink, reply: SpeculateReply, answer_seconds: float) -> None:
        use = self._links.get(link)
        if use is None:
            return
        use.late_since = None
        use.credit = reply.credit
        if reply.timing is not None:
            held, step, batch = reply.timing.held_seconds, reply.timing.step_seconds, reply.timing.batch
            use.costs.observe_reply(answer_seconds, held, step, batch)
        now, sequences = self._clock(), use.sequences
        for name, proposal in reply.proposals.items():
            sequence = sequences.get(name)  # absent: closed meanwhile
            if sequence is not None:
                self._take_proposal(sequence, proposal, now)
        for name in reply.lost | reply.refused:
            sequence = use.sequences.pop(name, None)
            if sequence is None:
                continue
            use.request.advances.pop(name, None)
            if name in reply.refused:
                self.stats.num_refused += 1
            else:
                self.stats.num_lost += 1
            pause = min(_REOPEN_SECONDS * 2**sequence.num_refusals, _MAX_REOPEN_SECONDS)
            sequence.may_open_at = self._clock() + pause
            sequence.num_refusals += 1
            self._unassign(sequence)

    def _take_proposal(self, sequence: SpeculativeSequence, proposal: Proposal, now: float) -> None:
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
            sequence.awaited_since = now
        sequence.is_late = False

    def _unassign(self, sequence: SpeculativeSequence) -> None:
        sequence.link = None
        sequence.proposal = None
        sequence.awaited_since, sequence.is_late = None, False
        self._committed.pop(sequence, None)
        self._unassigned[sequence] = None
