"""Measures acceptance by depth and rank, and derives tree shapes from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.speculation.drafts import Drafts, chain, depths_of
from cluster.speculation.learned_curve import knots
from cluster.speculation.tree import AcceptanceTable, RoundTime, Shape, best_shape, best_tree, ranks_of, token_rate
from cluster.speculation.tuning import INITIAL_RATE, KEEP, LEAST_GAIN, PRIOR, WINDOW


def depth_limits(deepest: int) -> list[int]:
    """Returns the limits of depth that the search for the best depth tries, up to `deepest`."""
    return [*(limit for limit in knots(deepest) if limit < deepest), deepest]


@dataclass(frozen=True, slots=True)
class Template:
    """The likeliest nodes of a tree of limited depth, best first. The first n nodes are a tree for any n.

    The template describes the average sequence. `survivals` adapts it to one sequence: the first child of a node has
    the sequence's own acceptance, and the rest of the probability is divided among the others as in the template.
    """

    parents: Shape
    levels: npt.NDArray[np.int64]  # [nodes], 1 for a root
    shares: npt.NDArray[np.float64]  # [nodes], share of the remaining probability; 0 for a first child

    @classmethod
    def of(cls, acceptance: AcceptanceTable, num_nodes: int, max_level: int) -> Template:
        parents, _ = best_tree(acceptance, num_nodes, max_level)
        levels, ranks = np.array(depths_of(parents), int), np.array(ranks_of(parents), int)
        of_level = acceptance[np.minimum(levels, len(acceptance)) - 1]
        of_rank = np.take_along_axis(of_level, ranks[:, None], axis=1)[:, 0]
        left_over = np.maximum(1.0 - of_level[:, 0], 1e-9)
        return cls(parents, levels, np.where(ranks > 0, of_rank / left_over, 0.0))

    def survivals(self, rates: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the probability that each node is accepted, [sequences, nodes], never rising along the nodes.

        `rates`, [sequences, depths]: acceptance of first children.
        """
        alive = np.empty((len(rates), len(self.parents)))
        for node, (parent, level, share) in enumerate(zip(self.parents, self.levels, self.shares, strict=True)):
            first = rates[:, min(level, rates.shape[1]) - 1]
            reached = first if share == 0.0 else (1.0 - first) * share
            alive[:, node] = reached if parent < 0 else reached * alive[:, parent]
        falling: npt.NDArray[np.float64] = np.minimum.accumulate(alive, axis=1)
        return falling


class TreePolicy:
    """Trees of up to `max_nodes` nodes with up to `width` children each.

    With width 1 there are only chains, and nothing is measured. The shapes are computed again after `WINDOW` rounds.
    """

    def __init__(self, width: int, max_nodes: int) -> None:
        self.may_branch = width > 1  # whether drafts may be trees, so that acceptance is measured by rank
        self._width = width
        self._max_nodes = max_nodes
        # By depth and rank: how often a child was verified, and how often it was chosen, given that none before it was.
        self._num_tried = np.full((max_nodes, width), PRIOR)
        self._num_hits = INITIAL_RATE * self._num_tried
        self._shapes: dict[int, Shape | None] = {}
        self._templates: list[Template] = []
        self._rounds_to_renew = 0

    def shape(self, num_nodes: int, time: Callable[[], RoundTime]) -> Shape | None:
        """Returns the best tree of `num_nodes` nodes for rounds of `time`; None if a chain is best."""
        if num_nodes < 2 or not self.may_branch:
            return None
        self._renew()
        if num_nodes not in self._shapes:
            self._shapes[num_nodes] = _best(self.acceptance(), num_nodes, time())
        return self._shapes[num_nodes]

    def templates(self) -> Sequence[Template]:
        """Returns a template for each candidate depth limit; none with width 1.

        The first n nodes of a template are a tree for any n.
        """
        if not self.may_branch:
            return ()
        self._renew()
        if not self._templates:
            acceptance, deepest = self.acceptance(), self._max_nodes
            self._templates = [Template.of(acceptance, deepest, limit) for limit in depth_limits(deepest)]
        return self._templates

    def _renew(self) -> None:
        if self._rounds_to_renew <= 0:
            self._rounds_to_renew = WINDOW
            self._shapes.clear()
            self._templates = []

    def acceptance(self) -> AcceptanceTable:
        """Returns the measured probability of each depth and rank."""
        if_not_before = self._num_hits / self._num_tried
        not_before = np.cumprod(1.0 - if_not_before, axis=1)
        rates: AcceptanceTable = if_not_before * np.hstack([np.ones((len(if_not_before), 1)), not_before[:, :-1]])
        return rates

    def count(self, drafts: Drafts, chosen: Sequence[int]) -> None:
        """Learns from a round. `drafts`: verified drafts. `chosen`: the target's choices.

        A chain only measures the first rank; the other ranks stay unchanged.
        """
        if not drafts or not self.may_branch:
            return
        self._rounds_to_renew -= 1
        self._num_tried *= KEEP
        self._num_hits *= KEEP
        parents = chain(len(drafts)) if drafts.parents is None else drafts.parents
        parent: int | None = -1
        for depth, choice in enumerate(chosen):
            row = min(depth, self._max_nodes - 1)
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


def _best(acceptance: AcceptanceTable, num_nodes: int, time: RoundTime) -> Shape | None:
    shape, of_chain = best_shape(acceptance, [num_nodes], time), tuple(chain(num_nodes))
    if token_rate(shape, acceptance, time) < LEAST_GAIN * token_rate(of_chain, acceptance, time):
        return None
    return shape
