"""Runs the rounds of one target replica's sequences against the draft pool.

The engine's thread calls, once a step:

    coordinator.wait(decoding)            # until their proposals are here, or the draft timeout is over
    coordinator.drafts(sequence)          # what to verify
    coordinator.commit(sequence)          # after the step: its token_ids have grown
    coordinator.flush()                   # at most one message a link

A sequence without drafts decodes plainly. Nothing here can change a token: drafts are only ever compared with the
target's choices.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from cluster.config import SpeculationConfig
from cluster.coordination.link import DraftLink, LinkState
from cluster.coordination.messages import Advance, Open, Proposal, SpeculateReply, SpeculateRequest
from cluster.coordination.pool import DraftPool
from cluster.speculation.drafts import Drafts
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.tree_policy import TreePolicy

logger = logging.getLogger(__name__)

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


@dataclass(eq=False, slots=True)
class SpeculativeSequence:
    """What the coordinator keeps of one sequence. `token_ids` is the engine's own list of committed tokens."""

    token_ids: Sequence[int]
    num_prompt_tokens: int
    params: SamplingParams
    noise_key: NoiseKey
    num_speculative_tokens: int
    name: int = 0  # its number on the wire, a new one each time it is opened
    link: DraftLink | None = None
    acknowledged: int = 0  # committed length the drafter is known to have been told
    proposal: Proposal | None = None
    awaited_since: float | None = None  # when the proposal that is awaited was asked for
    is_late: bool = False  # a step has stopped waiting for it
    num_refusals: int = 0
    may_open_at: float = 0.0


@dataclass(slots=True)
class _LinkUse:
    """A link that is up: its sequences by number, and what is to be sent on it."""

    sequences: dict[int, SpeculativeSequence] = field(default_factory=dict)
    request: SpeculateRequest = field(default_factory=SpeculateRequest)


class Coordinator:
    """See the module. Not thread-safe: it belongs to the engine's thread."""

    def __init__(
        self,
        pool: DraftPool,
        config: SpeculationConfig,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = CoordinatorStats()
        self.trees = TreePolicy(config.tree_width, clock)
        self._pool = pool
        self._config = config
        self._vocab_size = vocab_size
        self._clock = clock
        self._links: dict[DraftLink, _LinkUse] = {}
        self._unassigned: dict[SpeculativeSequence, None] = {}  # in the order they came
        self._num_openings_ever = 0

    def open(self, sequence: SpeculativeSequence) -> None:
        """Starts drafting for `sequence`; with k = 0 it never is.

        A sequence that the engine preempted stays open: what was proposed for it still fits when it runs again, and
        nobody waits for it meanwhile. There are never more open sequences than may run at once, as the engine
        admits no other before it. Opening it again changes nothing.
        """
        if sequence.num_speculative_tokens == 0 or sequence.link is not None:
            return
        self._unassigned[sequence] = None

    def close(self, sequence: SpeculativeSequence) -> None:
        self._unassigned.pop(sequence, None)
        if sequence.link is not None:
            use = self._links[sequence.link]
            del use.sequences[sequence.name]
            use.request.merge(SpeculateRequest(closes={sequence.name}))
            sequence.link = None

    def wait(self, sequences: Iterable[SpeculativeSequence]) -> None:
        """Waits until the proposals of `sequences` that are awaited are here, at most the draft timeout each."""
        self._take_events()
        awaited = [s for s in sequences if s.awaited_since is not None and not s.is_late]
        timeout = self._config.draft_timeout_ms / 1000.0
        while awaited:
            now = self._clock()
            for sequence in awaited:
                assert sequence.awaited_since is not None
                if now >= sequence.awaited_since + timeout:
                    sequence.is_late = True
                    self.stats.num_late_rounds += 1
            awaited = [s for s in awaited if s.awaited_since is not None and not s.is_late]
            if awaited:
                deadline = min(s.awaited_since for s in awaited if s.awaited_since is not None) + timeout
                self._take_events(deadline - now)
                awaited = [s for s in awaited if s.awaited_since is not None]

    def drafts(self, sequence: SpeculativeSequence) -> Drafts:
        """What to verify after the committed tokens: the part of the last proposal that still fits."""
        proposal = sequence.proposal
        if proposal is None:
            return Drafts()
        drafts = _what_fits(proposal, sequence.token_ids)
        if drafts is None:
            sequence.proposal = None
            return Drafts()
        drafts = drafts.first(sequence.num_speculative_tokens)
        valid = drafts.below(self._vocab_size)
        self.stats.num_invalid_token_ids += len(drafts) - len(valid)
        return valid

    def commit(self, sequence: SpeculativeSequence) -> None:
        """Tells the drafter, at the next flush, what `sequence` has committed."""
        if sequence.link is None:
            return
        self._links[sequence.link].request.advances[sequence.name] = Advance(
            sequence.name,
            sequence.acknowledged,
            sequence.token_ids[sequence.acknowledged :],
            sequence.num_speculative_tokens,
            self.trees.shape(sequence.num_speculative_tokens),
        )
        if not sequence.is_late:
            sequence.awaited_since = self._clock()

    def flush(self) -> None:
        """Sends what is waiting, one message a link; gives sequences without a drafter one."""
        self._take_events()  # a link that came up since the last step takes the new sequences at once
        self._assign()
        for link, use in self._links.items():
            if use.request:
                link.send(use.request)
                use.request = SpeculateRequest()

    def _assign(self) -> None:
        """Opens sequences on the link with the fewest."""
        if not self._links or not self._unassigned:
            return
        now = self._clock()
        for sequence in [s for s in self._unassigned if s.may_open_at <= now]:
            link, use = min(self._links.items(), key=lambda item: len(item[1].sequences))
            del self._unassigned[sequence]
            # A number that was used before could still be spoken of by a reply that is on its way.
            self._num_openings_ever += 1
            sequence.name = self._num_openings_ever
            use.sequences[sequence.name] = sequence
            use.request.opens[sequence.name] = self._opening(sequence)
            sequence.link = link
            sequence.acknowledged = len(sequence.token_ids)
            sequence.awaited_since, sequence.is_late = now, False

    def _opening(self, sequence: SpeculativeSequence) -> Open:
        k = sequence.num_speculative_tokens
        return Open(
            sequence.name,
            list(sequence.token_ids),
            sequence.num_prompt_tokens,
            sequence.params,
            sequence.noise_key,
            k,
            self._config.window(k),
            self.trees.shape(k),
        )

    def _take_events(self, timeout: float = 0.0) -> None:
        for happened in self._pool.poll(timeout):
            if isinstance(happened.event, SpeculateReply):
                self._take_reply(happened.link, happened.event)
            elif happened.event is LinkState.UP:
                self._links[happened.link] = _LinkUse()
            else:
                use = self._links.pop(happened.link, None)
                for sequence in use.sequences.values() if use is not None else ():
                    self._unassign(sequence)

    def _take_reply(self, link: DraftLink, reply: SpeculateReply) -> None:
        use = self._links.get(link)
        if use is None:
            return
        for name, proposal in reply.proposals.items():
            sequence = use.sequences.get(name)  # absent: closed meanwhile
            if sequence is not None:
                self._take_proposal(sequence, proposal)
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

    def _take_proposal(self, sequence: SpeculativeSequence, proposal: Proposal) -> None:
        if proposal.base < sequence.acknowledged or proposal.base > len(sequence.token_ids):
            self.stats.num_stale_proposals += 1
            return
        window = self._config.window(sequence.num_speculative_tokens)
        self.stats.num_excess_token_ids += max(0, len(proposal.token_ids) - window)
        drafts, is_first = proposal.drafts.first(window), sequence.proposal is None
        proposal = replace(proposal, token_ids=drafts.token_ids, parents=drafts.parents)
        if _what_fits(proposal, sequence.token_ids) is not None:
            sequence.proposal = proposal
        else:
            self.stats.num_stale_proposals += 1
        sequence.acknowledged = proposal.base
        sequence.num_refusals = 0
        if proposal.base == len(sequence.token_ids):
            if sequence.awaited_since is not None and drafts and not is_first:
                self.trees.time_draft(self._clock() - sequence.awaited_since, drafts.depth)
            sequence.awaited_since = None
        elif sequence.is_late:
            # The drafter lives but trails behind: what it was told since gets a budget of its own.
            sequence.awaited_since = self._clock()
        sequence.is_late = False

    def _unassign(self, sequence: SpeculativeSequence) -> None:
        sequence.link = None
        sequence.proposal = None
        sequence.awaited_since, sequence.is_late = None, False
        self._unassigned[sequence] = None


def _what_fits(proposal: Proposal, committed: Sequence[int]) -> Drafts | None:
    """What is left of `proposal` after the tokens committed since its base; None when it does not begin with them."""
    return proposal.drafts.after(committed[proposal.base :])
