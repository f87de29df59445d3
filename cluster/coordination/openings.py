"""Which sequences are open on which draft worker: opens them, takes them away, and keeps those that wait for one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cluster.config import SpeculationConfig
from cluster.coordination.planner import DepthPlanner
from cluster.coordination.sequence import SpeculativeSequence
from cluster.coordination.spread import LinkUse, Spread
from cluster.coordination.stats import CoordinatorStats
from cluster.speculation.noise import NoiseDomain
from cluster.speculation.tree import Shape, num_levels
from cluster.wire.messages import Open, SpeculateReply, SpeculateRequest

_REOPEN_SECONDS = 1.0  # a refused sequence is not opened again before; doubled with every refusal
_MAX_REOPEN_SECONDS = 60.0


class Openings:
    """Belongs to a coordinator, whose parts it is given."""

    def __init__(
        self,
        config: SpeculationConfig,
        planner: DepthPlanner,
        spread: Spread,
        stats: CoordinatorStats,
        clock: Callable[[], float],
    ) -> None:
        self.waiting: dict[SpeculativeSequence, None] = {}  # for a draft worker, in the order they came
        self._config = config
        self._planner = planner
        self._spread = spread
        self._stats = stats
        self._clock = clock
        self._num_ever = 0

    def add(self, sequence: SpeculativeSequence) -> None:
        self._planner.open(sequence)
        sequence.window = self._config.window(sequence.num_speculative_tokens or self._config.max_speculative_tokens)
        self.waiting[sequence] = None

    def remove(self, sequence: SpeculativeSequence) -> None:
        self._planner.close(sequence)
        self._leave_link(sequence)
        self.waiting.pop(sequence, None)

    def may_open(self, sequence: SpeculativeSequence, now: float) -> bool:
        """Whether `sequence` waits, and may be opened on a draft worker by now."""
        return sequence in self.waiting and sequence.may_open_at <= now

    def rearrange(self) -> None:
        """Takes sequences from draft workers that are silent, or far slower than others."""
        if len(self._spread.uses) < 2:
            return
        now, depth = self._clock(), max(1, self._planner.opening_depth)
        ejected = [s for use in self._spread.to_eject(now) for s in use.sequences.values()]
        for sequence in [*ejected, *self._spread.to_move(depth, now)]:
            self._leave_link(sequence)

    def assign(self) -> None:
        """Opens the sequences that want drafts."""
        if not self.waiting or not self._spread.uses:
            return
        now = self._clock()
        for sequence in [s for s in self.waiting if s.may_open_at <= now and (s.depth > 0 or s.is_shadow)]:
            num_tokens = len(sequence.token_ids) + self._config.window(sequence.depth)
            use = self._spread.choose(max(1, sequence.depth), num_tokens, now)
            if use is None:
                sequence.may_open_at = now + _REOPEN_SECONDS
                self._stats.num_without_credit += 1
                continue
            del self.waiting[sequence]
            if use.credit is not None:
                use.credit -= num_tokens
            self._open_on(use, sequence, now)

    def turn_away(self, use: LinkUse, reply: SpeculateReply) -> None:
        """The worker of `use` does not hold these sequences, or has no room for them: they wait, longer every time."""
        for name in reply.lost | reply.refused:
            sequence = use.sequences.pop(name, None)
            if sequence is None:
                continue
            use.request.advances.pop(name, None)
            if name in reply.refused:
                self._stats.num_refused += 1
            else:
                self._stats.num_lost += 1
            pause = min(_REOPEN_SECONDS * 2**sequence.num_refusals, _MAX_REOPEN_SECONDS)
            sequence.may_open_at = self._clock() + pause
            sequence.num_refusals += 1
            self.unassign(sequence)

    def unassign(self, sequence: SpeculativeSequence) -> None:
        """`sequence` has no drafter any more, and waits for another."""
        sequence.link = None
        sequence.proposal = None
        sequence.awaited_since, sequence.is_late = None, False
        self.waiting[sequence] = None

    def _leave_link(self, sequence: SpeculativeSequence) -> None:
        """Its drafter forgets `sequence`, which waits for another."""
        if sequence.link is not None:
            use = self._spread.uses[sequence.link]
            del use.sequences[sequence.name]
            use.credit = None  # its room is free, but how much that is only the worker knows
            use.request.merge(SpeculateRequest(closes={sequence.name}))
        self.unassign(sequence)

    def _open_on(self, use: LinkUse, sequence: SpeculativeSequence, now: float) -> None:
        # A number that was used before could still be spoken of by a reply that is on its way.
        self._num_ever += 1
        sequence.name = self._num_ever
        use.sequences[sequence.name] = sequence
        sequence.link = use.link
        depth = sequence.depth or self._planner.asked_depth(sequence, use.costs)
        shape = self._planner.shape(sequence, depth, use.costs)
        sequence.num_levels = num_levels(shape, depth)
        use.request.opens[sequence.name] = self._opening(sequence, depth, shape)
        sequence.acknowledged = len(sequence.token_ids)
        # The worker will hardly have room so soon for one that it refused: nobody waits for its answer.
        sequence.awaited_since, sequence.is_late = None if sequence.num_refusals else now, False

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
