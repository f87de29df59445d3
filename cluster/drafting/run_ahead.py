"""Run-ahead: drafts that a worker makes before they are requested, while the targets verify.

The main path continues after the proposal: under the shared noise its next token is the best guess of the bonus token.
A branch starts with a next best token of the draft, for the case that the target rejects the best one, and has the
length of a proposal. Nodes are extended in order of probability, in steps that draft owed proposals and have room, and
in steps of their own.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import itemgetter

import numpy as np

from cluster.drafters.base import DraftSequence
from cluster.speculation.learned_curve import LearnedCurve
from cluster.speculation.tree import width_of
from cluster.telemetry.metrics import Reading

_NUM_POSITIONS = 64
_DECAY = 0.998  # decay of the counts per round
MAX_NODES_AHEAD = 64  # nodes that a step extends ahead: choosing them takes as long as a small step
MAX_SEQUENCES_AHEAD = 32  # with more sequences, running ahead stops: its bookkeeping takes 80 us per sequence and step
_SLOWER = 1.1  # while a proposal is owed, rows that run ahead may make a step this many times as long
_MAX_BRANCH_CHANCE = 0.5  # maximum chance of a next best token: its score is lower than the best


class RunAhead:
    """Learns at which positions outcomes leave the main path, and predicts from it the nodes that will be needed.

    Share of the rounds whose next proposal was ready at once:
        sum(rate(outrider_run_ahead_hits_total[1m]))
          / (sum(rate(outrider_run_ahead_hits_total[1m])) + sum(rate(outrider_run_ahead_misses_total[1m])))
    """

    def __init__(self, num_branches: int) -> None:
        self.num_branches = num_branches
        self._hits: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        # For each position of the main path: rounds that reached it, and rounds that left the path there. The first
        # estimate is that a quarter leaves.
        self._reached = [4.0] * _NUM_POSITIONS
        self._left = [1.0] * _NUM_POSITIONS
        # Over the next best tokens at positions where a round left: how many the target chose, and their summed odds.
        self._taken, self._odds = 1.0, 1.0

    def width(self, sequence: DraftSequence, *, may_branch: bool) -> int:
        """Returns the number of children for each node of `sequence`."""
        asked = 1 if sequence.shape is None else width_of(sequence.shape)
        return max(asked, 1 + self.num_branches) if may_branch and runs_ahead(sequence) else asked

    def stays(self, sequence: DraftSequence, parent: int) -> float:
        """Returns the probability that the target chooses the first child of `parent`, given that it chose `parent`.

        `parent` is on the main path, or on the continuation of a branch.
        """
        position = min(sequence.depth(parent), sequence.proposal_depth, _NUM_POSITIONS - 1)
        return 1.0 - self._left[position] / self._reached[position]

    def chances(self, sequence: DraftSequence, parent: int) -> list[float]:
        """Returns the probability of each child of `parent`, given that the target chose `parent`."""
        position = min(sequence.depth(parent), sequence.proposal_depth, _NUM_POSITIONS - 1)
        left = self._left[position] / self._reached[position]
        found = [1.0 - left]
        for child in sequence.children(parent)[1:]:
            odds = math.exp(-sequence.gaps[child])
            found.append(left * min(odds * self._taken / self._odds, _MAX_BRANCH_CHANCE))
        return found

    def observe(self, sequence: DraftSequence, news: Sequence[int]) -> str:
        """Learns from `news`, committed tokens that `sequence` does not have yet. Returns the kind of outcome."""
        node = -1
        for position, token in enumerate(news[:_NUM_POSITIONS]):
            children = sequence.children(node)
            if not children or position > sequence.proposal_depth:
                break
            has_left = sequence.token_of(children[0]) != token
            self._reached[position] = _DECAY * self._reached[position] + 1.0
            self._left[position] = _DECAY * self._left[position] + has_left
            if has_left:
                for other in children[1:]:
                    self._taken = _DECAY * self._taken + (sequence.token_of(other) == token)
                    self._odds = _DECAY * self._odds + math.exp(-sequence.gaps[other])
                break
            node = children[0]
        num_accepted = min(max(0, len(news) - 1), _NUM_POSITIONS)  # limits the number of kinds of outcomes
        rest = sequence.proposal().after(news[:num_accepted])
        return "all_accepted" if rest is not None and not rest else f"rejected_at_{num_accepted}"

    def count(self, kind: str, *, is_hit: bool) -> None:
        """Counts an outcome of this kind. `is_hit`: the next proposal was ready."""
        (self._hits if is_hit else self._misses)[kind] += 1

    def readings(self) -> Iterator[Reading]:
        what = "Rounds whose next proposal was {} when their outcome arrived, by outcome."
        for name, counts, state in (("hits", self._hits, "there"), ("misses", self._misses, "not there")):
            for kind, count in sorted(counts.items()):
                yield Reading(
                    f"outrider_run_ahead_{name}", what.format(state), count, is_counter=True, labels={"kind": kind}
                )


class Frontier:
    """Nodes that may be extended ahead for a sequence whose proposals are chains, with their probabilities.

    `follow` adds the sequence's new nodes. After a commit the sequence needs a new frontier.
    """

    def __init__(self, sequence: DraftSequence, run_ahead: RunAhead) -> None:
        self.nodes = [-1]  # nodes that may be extended, most likely first
        self.chances = {-1: 1.0}  # by node that an outcome may lead to: the probability that the target chooses it
        self._sequence = sequence
        self._run_ahead = run_ahead
        self._num_seen = 0  # nodes that were examined
        self._main = {-1}  # nodes of the main path
        self._max_depths = {-1: sequence.window}  # maximum depths below the nodes in `chances`

    def follow(self) -> None:
        """Adds the nodes that the sequence got since the last call."""
        sequence, parents = self._sequence, self._sequence.parents
        if self._num_seen == len(parents):
            return
        run_ahead, all_chances, max_depths = self._run_ahead, self.chances, self._max_depths
        num_drafts, nodes = sequence.num_owed, self.nodes
        node, self._num_seen = self._num_seen, len(parents)
        while node < self._num_seen:
            parent = parents[node]
            siblings, depth = sequence.children(parent), sequence.depth(node)
            if parent in all_chances:
                before, max_depth = all_chances[parent], max_depths[parent]
                is_main = parent in self._main
                if is_main:
                    self._main.add(node)
                # The target may leave the main path at any token of the proposal, or at the bonus token.
                leaves = is_main and depth <= num_drafts + 1
                chances = run_ahead.chances(sequence, parent) if leaves else (run_ahead.stays(sequence, parent),)
                for child, chance in enumerate(chances, node):
                    all_chances[child], max_depths[child] = before * chance, max_depth
                    if depth < max_depth:
                        nodes.append(child)
                    max_depth = depth + num_drafts  # maximum depth of a branch
            node += len(siblings)
        self.nodes = [node for node in nodes if not sequence.children(node)]
        self.nodes.sort(key=all_chances.__getitem__, reverse=True)


def tree_nodes(sequence: DraftSequence, run_ahead: RunAhead) -> dict[int, float]:
    """Returns the nodes to extend ahead for a sequence whose proposals are trees, likeliest first.

    The value of a node is the probability that the next proposal needs it.
    """
    end = sequence.proposal_depth
    nodes = {sequence.tip: 1.0} if sequence.num_drafted <= end else {}
    node, before = -1, 1.0
    while (children := sequence.children(node)) and sequence.depth(node) <= end:
        chances = run_ahead.chances(sequence, node)
        for rank, (child, chance) in enumerate(zip(children, chances, strict=True)):
            if rank or sequence.depth(child) > end:
                nodes |= dict.fromkeys(sequence.missing(sys.maxsize, child), before * chance)
        before *= chances[0]
        node = children[0]
    return dict(sorted(nodes.items(), key=itemgetter(1), reverse=True))


def num_nodes_ahead(
    chances: Sequence[float],
    rows: Sequence[int],
    num_owed: int,
    num_owed_rows: int,
    curve: LearnedCurve,
    max_seconds: float = math.inf,
) -> int:
    """Returns the number of nodes that a step extends ahead, in addition to the owed nodes.

    With this number the step drafts the most needed tokens per second without noticeably delaying owed proposals.
    `chances`: probability that each node is needed, in falling order. `rows`: rows of each node. The `num_owed` owed
    nodes take `num_owed_rows` in total. If no node is owed, the step takes at most `max_seconds`.
    """
    if not chances or not curve.is_known:
        return len(chances)
    seconds = curve.at(num_owed_rows + np.cumsum([0, *rows]))
    rates = (num_owed + np.cumsum([0.0, *chances])) / np.maximum(seconds, 1e-9)
    if num_owed:
        rates[seconds > _SLOWER * seconds[0]] = 0.0
    else:
        rates[seconds > max_seconds] = 0.0
    return int(rates.argmax())


def runs_ahead(sequence: DraftSequence) -> bool:
    """Returns True if the window of `sequence` reaches beyond a proposal."""
    return sequence.window > sequence.num_owed > 0
