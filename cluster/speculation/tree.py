"""Chooses the tree to draft: the shape that commits the most tokens for its number of nodes, or for its duration.

The child of rank r is the draft's r-th best token under the target's noise. `acceptance[d, r]` is the probability that
this token is the target's choice after a node of depth d (0: the last committed token). A node is accepted if it and
all its ancestors are the target's choices. So a tree commits, including the bonus token,

    E = 1 + (sum over all nodes of the product of acceptance along the path to the node)       tokens.

Sequoia (Chen et al., arXiv 2402.12374, section 3.1) finds the best tree of every size by dynamic programming. Shared
noise makes this simpler: acceptance falls with the rank, and no child is likelier than its parent. So the n likeliest
nodes always form a tree, and no other n nodes have a larger sum.
"""

from __future__ import annotations

import functools
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.speculation.drafts import depths_of
from cluster.speculation.speed import round_seconds, tokens_per_round

Shape = tuple[int, ...]
"""The parents of a tree's nodes, as in Drafts. Siblings are in the order of their ranks."""

MAX_NODES = 64  # nodes of a shape: the number of drafts that a round may have

AcceptanceTable = npt.NDArray[np.float64]
"[num_depths, num_ranks]; deeper nodes have the acceptance of the last depth."


@dataclass(frozen=True, slots=True)
class RoundTime:
    """Durations of a round's parts, by the number of rows; all in one unit."""

    draft: Callable[[int], float]  # time of a draft step with that number of rows
    verify: Callable[[int], float]  # time of a target step with that number of rows of this sequence
    round_trip: float = 0.0


def width_of(shape: Shape) -> int:
    """Returns the largest number of children of a node, at least 1."""
    return max(Counter(shape).values(), default=1)


@functools.lru_cache(256)
def num_levels(shape: Shape | None, num_nodes: int) -> int:
    """Returns the number of levels of `shape`. None is a chain of `num_nodes` nodes."""
    return num_nodes if shape is None else max(depths_of(shape), default=0)


def ranks_of(shape: Sequence[int]) -> list[int]:
    """Returns the number of siblings before each node."""
    num_children: Counter[int] = Counter()
    ranks = []
    for parent in shape:
        ranks.append(num_children[parent])
        num_children[parent] += 1
    return ranks


def best_tree(acceptance: AcceptanceTable, num_nodes: int, max_depth: int | None = None) -> tuple[Shape, list[float]]:
    """Returns the tree of `num_nodes` nodes that commits the most tokens, and each node's acceptance probability.

    The first n nodes of the result are the best tree of n nodes. Among equally likely nodes the deeper one comes first.
    The result has fewer nodes if `max_depth` and the number of ranks allow no more, or if all other nodes are never
    accepted.
    """
    falling = np.minimum.accumulate(acceptance, axis=1).tolist()
    parents: list[int] = []
    survival: list[float] = []
    # Entries: −probability, −depth, parent, rank.
    candidates = [(-falling[0][0], -1, -1, 0)]
    while candidates and len(parents) < num_nodes:
        negative, negative_depth, parent, rank = heapq.heappop(candidates)
        depth = -negative_depth
        if negative == 0.0 or depth > (num_nodes if max_depth is None else max_depth):
            continue
        node = len(parents)
        parents.append(parent)
        survival.append(-negative)
        of_depth = falling[min(depth, len(falling)) - 1]
        if rank + 1 < len(of_depth):
            before = survival[parent] if parent >= 0 else 1.0
            heapq.heappush(candidates, (-before * of_depth[rank + 1], -depth, parent, rank + 1))
        below = falling[min(depth, len(falling) - 1)]
        heapq.heappush(candidates, (negative * below[0], -depth - 1, node, 0))
    return tuple(parents), survival


def expected_tokens(shape: Sequence[int], acceptance: AcceptanceTable) -> float:
    """Returns E, the expected number of committed tokens, of any tree."""
    falling = np.minimum.accumulate(acceptance, axis=1)
    survival: list[float] = []
    for parent, depth, rank in zip(shape, depths_of(shape), ranks_of(shape), strict=True):
        rate = float(falling[min(depth, len(falling)) - 1, rank]) if rank < falling.shape[1] else 0.0
        survival.append((survival[parent] if parent >= 0 else 1.0) * rate)
    return tokens_per_round(survival)


def token_rate(shape: Sequence[int], acceptance: AcceptanceTable, time: RoundTime) -> float:
    """Returns E divided by the duration of a round."""
    depths = [0, *depths_of(shape)]
    num_rows = Counter(depths[parent + 1] for parent in set(shape))  # rows of each step of the draft
    seconds = round_seconds(_draft_time(num_rows.values(), time), time.verify(1 + len(shape)), time.round_trip)
    return expected_tokens(shape, acceptance) / seconds


def best_shape(acceptance: AcceptanceTable, num_nodes: Iterable[int], time: RoundTime) -> Shape:
    """Returns the shape with the highest token rate among those whose number of nodes is in `num_nodes`.

    Deep trees take more draft steps, broad trees take more rows of the target per token, so every maximum depth is
    tried. Among equal rates the deepest shape is returned, so the result is a chain unless another shape is better.
    """
    budgets = set(num_nodes)
    largest = max(budgets)
    best: Shape = ()
    best_rate = token_rate((), acceptance, time) if 0 in budgets else 0.0
    for max_depth in range(1, 1 + max(depths_of(best_tree(acceptance, largest)[0]), default=0)):
        whole, survival = best_tree(acceptance, largest, max_depth)
        depths = [0, *depths_of(whole)]
        tokens, num_rows = 1.0, [0] * (max_depth + 1)
        for size, (parent, probability) in enumerate(zip(whole, survival, strict=True), start=1):
            tokens += probability
            if parent not in whole[: size - 1]:
                num_rows[depths[parent + 1]] += 1
            if size in budgets:
                rate = tokens / round_seconds(_draft_time(num_rows, time), time.verify(1 + size), time.round_trip)
                if rate >= best_rate:
                    best, best_rate = whole[:size], rate
    return best


def _draft_time(num_rows: Iterable[int], time: RoundTime) -> float:
    return sum(time.draft(number) for number in num_rows if number)
