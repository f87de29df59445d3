"""Chooses the shape of proposals from what was measured: acceptance by depth and rank, draft time, verify time."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from cluster.speculation.drafts import Drafts, chain
from cluster.speculation.tree import Acceptance, RoundTime, Shape, best_shape, token_rate

_NUM_DEPTHS = 8  # that are told apart
_DECAY = 0.998  # of what was counted, a round: about the last 500 rounds count
_RENEW_SECONDS = 2.0
_NUM_TIMES = 64  # the latest, of which the median counts: a prompt or a pause among them does not
_LEAST_GAIN = 1.03  # over the chain: what is measured is not known to the last percent
# What is taken for true at first, and counts as much as 4 rounds: acceptance of the best child, and of the child of
# each later rank when none before it was the choice. Those figures are of the bundled pair.
_FIRST_RANK, _LATER_RANKS, _PRIOR_ROUNDS = 0.75, 0.45, 4.0


class TreePolicy:
    """Trees whose nodes have up to `width` children; with 1 there are only chains, and nothing is measured.

    `shape` is what to ask for; the rest is told to it. What it answers changes every few seconds at most.
    """

    def __init__(self, width: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._width = width
        self._clock = clock
        rates = np.array([_FIRST_RANK] + [_LATER_RANKS] * (width - 1))
        self._num_tried = np.full((_NUM_DEPTHS, width), _PRIOR_ROUNDS)
        self._num_hits = _PRIOR_ROUNDS * np.tile(rates, (_NUM_DEPTHS, 1))
        self._draft_times: dict[int, deque[float]] = {}  # by the number of levels
        self._verify_times: deque[float] = deque(maxlen=_NUM_TIMES)
        self._shapes: dict[int, Shape | None] = {}
        self._renew_at = 0.0

    @property
    def may_branch(self) -> bool:
        """Whether there are trees, and something to measure."""
        return self._width > 1

    def shape(self, num_nodes: int) -> Shape | None:
        """The best tree of `num_nodes` nodes; None when it is the chain."""
        if num_nodes < 2 or not self.may_branch:
            return None
        now = self._clock()
        if now >= self._renew_at:
            self._renew_at = now + _RENEW_SECONDS
            self._shapes.clear()
        if num_nodes not in self._shapes:
            self._shapes[num_nodes] = self._best(num_nodes)
        return self._shapes[num_nodes]

    def _best(self, num_nodes: int) -> Shape | None:
        acceptance, time = self.acceptance(), self._round_time()
        shape, of_chain = best_shape(acceptance, [num_nodes], time), tuple(chain(num_nodes))
        if token_rate(shape, acceptance, time) < _LEAST_GAIN * token_rate(of_chain, acceptance, time):
            return None
        return shape

    def acceptance(self) -> Acceptance:
        """The probability of each depth and rank, as measured."""
        if_not_before = self._num_hits / self._num_tried
        not_before = np.cumprod(1.0 - if_not_before, axis=1)
        rates: Acceptance = if_not_before * np.hstack([np.ones((_NUM_DEPTHS, 1)), not_before[:, :-1]])
        return rates

    def count(self, drafts: Drafts, chosen: Sequence[int]) -> None:
        """A round verified `drafts`, and the target chose the tokens `chosen`.

        A chain says something about the first rank only: what is known of the others stays.
        """
        if not drafts or not self.may_branch:
            return
        self._num_tried *= _DECAY
        self._num_hits *= _DECAY
        parents = chain(len(drafts)) if drafts.parents is None else drafts.parents
        parent: int | None = -1
        for depth, choice in enumerate(chosen):
            row = min(depth, _NUM_DEPTHS - 1)
            children = [node for node, its_parent in enumerate(parents) if its_parent == parent][: self._width]
            parent = None
            for rank, child in enumerate(children):
                self._num_tried[row, rank] += 1.0
                if drafts.token_ids[child] == choice:
                    self._num_hits[row, rank] += 1.0
                    parent = child
                    break
            if parent is None:
                return

    def time_draft(self, seconds: float, num_levels: int) -> None:
        """A proposal of `num_levels` levels came `seconds` after it was asked for."""
        self._draft_times.setdefault(num_levels, deque(maxlen=_NUM_TIMES)).append(seconds)

    def time_verify(self, seconds: float) -> None:
        """A step that verified drafts took `seconds`."""
        self._verify_times.append(seconds)

    def _round_time(self) -> RoundTime:
        """All shapes compared have as many rows, and a level's are hardly felt beside the weights that it reads."""
        if not self._verify_times or not self._draft_times:
            return RoundTime(lambda _: 0.0, lambda _: 1.0)
        verify = statistics.median(self._verify_times)
        shallow, deep = min(self._draft_times), max(self._draft_times)
        seconds = statistics.median(self._draft_times[deep])
        # The way there and back is a part of every time: seen between two depths, else taken to be worth one level.
        level = seconds / (deep + 1)
        if deep > shallow:
            level = max(0.0, seconds - statistics.median(self._draft_times[shallow])) / (deep - shallow)
        return RoundTime(lambda _: level, lambda _: verify, round_trip=max(0.0, seconds - deep * level))
