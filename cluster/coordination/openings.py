"""Opens sequences on draft workers, removes them, and keeps those that wait for a worker."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace

from cluster.config.speculation import SpeculationConfig
from cluster.coordination.balancer import LinkBalancer
from cluster.coordination.depths import DepthPlanner
from cluster.coordination.sequence import ActiveLink, SpeculativeSequence
from cluster.coordination.stats import CoordinatorStats
from cluster.speculation.noise import NoiseDomain
from cluster.speculation.tree import Shape
from cluster.wire.messages import Open, SpeculateReply, SpeculateRequest

logger = logging.getLogger(__name__)

_REOPEN_SECONDS = 1.0  # pause before a refused sequence is opened again; doubled by each refusal
_MAX_REOPEN_SECONDS = 60.0
_MAX_LOST_LINKS = 2  # a sequence is not opened again after this many links went down before they answered its opening


class Openings:
    """Opens a coordinator's sequences on links. The coordinator shares its planner, balancer and stats."""

    def __init__(
        self,
        config: SpeculationConfig,
        planner: DepthPlanner,
        balancer: LinkBalancer,
        stats: CoordinatorStats,
        clock: Callable[[], float],
    ) -> None:
        self._waiting: dict[SpeculativeSequence, None] = {}  # sequences without a draft worker, in order of arrival
        self._config = config
        self._planner = planner
        self._balancer = balancer
        self._stats = stats
        self._clock = clock
        self._wire_ids = itertools.count(1)

    def add(self, sequence: SpeculativeSequence) -> None:
        """Registers `sequence` for drafting, unless it is registered or its request set k = 0."""
        if sequence.acceptance is None and sequence.num_speculative_tokens != 0:
            self._planner.join(sequence)
            self._waiting[sequence] = None

    def remove(self, sequence: SpeculativeSequence) -> None:
        self._planner.leave(sequence)
        self._leave_link(sequence)
        self._waiting.pop(sequence, None)

    def may_be_drafted_for(self, sequence: SpeculativeSequence, now: float) -> bool:
        """Returns True if `sequence` has a drafter, or may get one at `now`."""
        return sequence.link is not None or (sequence in self._waiting and sequence.may_open_at <= now)

    def would_be_drafted_for(self, sequence: SpeculativeSequence) -> bool:
        """Returns True if `sequence` has a drafter or waits for one."""
        return sequence.link is not None or sequence in self._waiting

    def rearrange(self) -> None:
        """Takes sequences away from draft workers that are silent or less valuable than others, or for a trial."""
        for sequence in self._balancer.to_rearrange(self._clock()):
            self._leave_link(sequence)

    def assign(self) -> None:
        """Opens the waiting sequences that want drafts on the links that the balancer chooses."""
        if not self._waiting or not self._balancer.active:
            return
        now = self._clock()
        for sequence in [s for s in self._waiting if s.may_open_at <= now and s.useful_depth > 0]:
            num_tokens, window = len(sequence.token_ids), self._config.window(sequence.depth)
            link = self._balancer.choose(sequence, num_tokens, window, now)
            if link is None:
                sequence.kept_waiting(now + _REOPEN_SECONDS)
                self._stats.num_without_credit += 1
                continue
            del self._waiting[sequence]
            if link.credit is not None:
                link.credit -= link.room_for(num_tokens, window)
            self._open(sequence, link, now)

    def turn_away(self, link: ActiveLink, reply: SpeculateReply) -> None:
        """Detaches the sequences that the worker of `link` lost or refused in `reply`.

        The sequences wait for another worker. The pause before the next opening doubles with every refusal.
        """
        for wire_id in reply.lost | reply.refused:
            sequence = link.sequences.get(wire_id)
            if sequence is None:
                continue
            link.request.advances.pop(wire_id, None)
            if wire_id in reply.refused:
                self._stats.num_refused += 1
            else:
                self._stats.num_lost += 1
            sequence.turned_away(self._clock() + pause_seconds(sequence.num_refusals))
            self.detach(sequence)

    def lose(self, link: ActiveLink) -> None:
        """Detaches the sequences of `link`, which is down, so that they wait for another worker.

        Drafting stops for a sequence after `_MAX_LOST_LINKS` links in a row went down before they answered its opening,
        because the opening may be the cause.
        """
        sequences = list(link.sequences.values())
        num_given_up = 0
        for sequence in sequences:
            sequence.lost_its_link()
            if sequence.num_lost_links < _MAX_LOST_LINKS:
                self._waiting[sequence] = None
            else:
                num_given_up += 1
                self._stats.num_given_up += 1
        if sequences:
            num_tokens = sum(len(sequence.token_ids) for sequence in sequences)
            logger.info("%d sequences with %d tokens lost their draft worker", len(sequences), num_tokens)
        if num_given_up:
            logger.warning(
                "drafting stopped for %d sequences: %d draft workers in a row were lost before they answered the "
                "opening",
                num_given_up,
                _MAX_LOST_LINKS,
            )

    def detach(self, sequence: SpeculativeSequence) -> None:
        """Detaches `sequence` from its drafter, so that it waits for another."""
        sequence.detached()
        self._waiting[sequence] = None

    def _leave_link(self, sequence: SpeculativeSequence) -> None:
        """Releases `sequence` at its drafter, so that it waits for another."""
        link = sequence.link
        if link is not None:
            link.credit = None  # the worker has room again; its next reply reports the amount
            link.request.merge(SpeculateRequest(closes={sequence.wire_id}))
        self.detach(sequence)

    def _open(self, sequence: SpeculativeSequence, link: ActiveLink, now: float) -> None:
        self._planner.drafted_by(sequence, link.model)
        # Never reuse a wire ID: a reply on its way could still refer to its previous sequence.
        sequence.opened(link, next(self._wire_ids))
        num_drafts, shape = self._planner.wanted(sequence)
        link.request.opens[sequence.wire_id] = self._opening(sequence, num_drafts, shape)
        sequence.asked(num_drafts, shape, now)

    def _opening(self, sequence: SpeculativeSequence, num_drafts: int, shape: Shape | None) -> Open:
        params, noise_key = sequence.params, sequence.noise_key
        if self._config.acceptance in ("greedy", "engine"):
            params = replace(params, temperature=0.0)
        elif self._config.acceptance == "rejection":
            # The noise that drew a draft must not decide its acceptance.
            noise_key = noise_key.within(NoiseDomain.DRAFT)
        return Open(
            sequence.wire_id,
            list(sequence.token_ids),
            sequence.num_prompt_tokens,
            params,
            noise_key,
            num_drafts,
            self._config.granted_window,
            shape,
            sequence.cache_root,
            takes_parts=True,
        )


def pause_seconds(num_refusals: int) -> float:
    """Returns the pause in seconds before a sequence is opened again after `num_refusals` refusals in a row."""
    return min(_REOPEN_SECONDS * 2.0**num_refusals, _MAX_REOPEN_SECONDS)
