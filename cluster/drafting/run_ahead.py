"""What a draft worker drafts before it is asked, while the targets verify.

The main path goes on past the proposal: under the shared noise its next token is the best guess of the bonus token.
Branches start where the target may choose otherwise, at the draft's second best, and go on as far as a proposal needs.
When the outcome of a round is among them, the next proposal is there at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cluster.drafters.base import DraftSequence
from cluster.speculation.tree import width_of
from cluster.telemetry.metrics import Reading

_MAX_ROWS = 64  # of a step that has branches
_NUM_POSITIONS = 64
_DECAY = 0.998  # of what was counted, a round
_NEW = 0.1  # weight of the latest in an average of times


@dataclass(frozen=True, slots=True)
class Verification:
    """A proposal that a target is verifying."""

    sequence: DraftSequence
    sent_at: float
    turnaround: float  # how long the target takes


class RunAhead:
    """Decides how far and along which branches to go, and when it is too late to begin another step.

    Share of the rounds whose next proposal was there at once:
        sum(rate(outrider_run_ahead_hits_total[1m]))
          / (sum(rate(outrider_run_ahead_hits_total[1m])) + sum(rate(outrider_run_ahead_misses_total[1m])))
    """

    def __init__(self, num_branches: int) -> None:
        self._num_branches = num_branches
        self._hits: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        # Of the rounds that reached each position of the main path, those that left it there; a quarter at first.
        self._reached = [4.0] * _NUM_POSITIONS
        self._left = [1.0] * _NUM_POSITIONS
        self._step_seconds: float | None = None

    def width(self, sequence: DraftSequence, *, may_branch: bool) -> int:
        """The children that a node of `sequence` needs."""
        asked = 1 if sequence.shape is None else width_of(sequence.shape)
        return max(asked, 2) if may_branch and self._num_branches and runs_ahead(sequence) else asked

    def nodes(
        self, sequences: Sequence[DraftSequence], max_model_len: int, *, may_branch: bool = True
    ) -> dict[DraftSequence, list[int]]:
        """The nodes to extend in the next step: the main paths, then branches while there is room for their rows.

        Without the sequences for which there is nothing to do.
        """
        wanted = {sequence: _main_nodes(sequence, max_model_len) for sequence in sequences if not sequence.is_exhausted}
        room = _MAX_ROWS - sum(map(len, wanted.values()))
        if may_branch and self._num_branches:
            for sequence, nodes in wanted.items():
                branches = self._branch_nodes(sequence, max_model_len)[: max(room, 0)]
                nodes.extend(node for node in branches if node not in nodes)
                room -= len(branches)
        return {sequence: nodes for sequence, nodes in wanted.items() if nodes}

    def _branch_nodes(self, sequence: DraftSequence, max_model_len: int) -> list[int]:
        """The nodes that the likeliest branches lack, of at most so many branches as are wanted."""
        if not runs_ahead(sequence):
            return []
        nodes: list[int] = []
        num_branches = 0
        for branch in self._branches(sequence):
            missing = sequence.missing(max_model_len, branch)
            if missing:
                nodes += missing
                num_branches += 1
                if num_branches == self._num_branches:
                    break
        return nodes

    def _branches(self, sequence: DraftSequence) -> list[int]:
        """The runners-up along what the target verifies and at the bonus token, the likeliest outcome first."""
        outcomes: list[tuple[float, int]] = []
        reached = 1.0
        node = -1
        for position in range(min(sequence.proposal_depth + 1, _NUM_POSITIONS)):
            children = sequence.children(node)
            if not children:
                break
            left = self._left[position] / self._reached[position]
            if len(children) > 1:
                # The closer the scores, the likelier is the other: their odds, were they logits.
                outcomes.append((reached * left * math.exp(-sequence.gaps[children[1]]), children[1]))
            reached *= 1.0 - left
            node = children[0]
        return [branch for _, branch in sorted(outcomes, reverse=True)]

    def observe(self, sequence: DraftSequence, news: Sequence[int]) -> str:
        """The target committed `news`, which `sequence` does not know yet. Returns the kind of outcome."""
        node = -1
        for position, token in enumerate(news[:_NUM_POSITIONS]):
            children = sequence.children(node)
            if not children or position > sequence.proposal_depth:
                break
            has_left = sequence.token_of(children[0]) != token
            self._reached[position] = _DECAY * self._reached[position] + 1.0
            self._left[position] = _DECAY * self._left[position] + has_left
            if has_left:
                break
            node = children[0]
        num_accepted = min(max(0, len(news) - 1), _NUM_POSITIONS)  # the kinds of outcomes are few, whatever is told
        rest = sequence.proposal().after(news[:num_accepted])
        return "all_accepted" if rest is not None and not rest else f"rejected_at_{num_accepted}"

    def count(self, kind: str, *, is_hit: bool) -> None:
        """After an outcome of this kind the next proposal was there, or was not."""
        (self._hits if is_hit else self._misses)[kind] += 1

    def time_step(self, seconds: float) -> None:
        """A step that ran ahead took `seconds`."""
        self._step_seconds = average(self._step_seconds, seconds)

    def closed_seconds(self, now: float, verifications: Iterable[Verification]) -> float:
        """How long no step should begin; 0 when one may.

        A step that still runs when a target answers delays what is needed then, unless the answer is what the step
        went on from. It begins when it gains more than it delays, on the average:

            P(all comes true) * time left  >=  (1 - P) * (step time - time left)

        A target that is late by a whole round is not waited for.
        """
        if self._step_seconds is None:
            return 0.0
        closed = 0.0
        chances: dict[int, float] = {}  # by depth: many sequences, few depths
        for verified in verifications:
            depth = verified.sequence.proposal_depth
            if depth not in chances:
                chances[depth] = self._chance(depth)
            needed = (1.0 - chances[depth]) * self._step_seconds
            until = verified.sent_at + 2.0 * verified.turnaround
            if verified.sent_at + verified.turnaround - now < needed and now < until:
                closed = max(closed, until - now)
        return closed

    def _chance(self, depth: int) -> float:
        """The chance that the outcome is a main path of `depth` drafts, the bonus token included."""
        positions = range(min(depth + 1, _NUM_POSITIONS))
        return math.prod(1.0 - self._left[position] / self._reached[position] for position in positions)

    def readings(self) -> Iterator[Reading]:
        what = "Rounds whose next proposal was {} when their outcome came, by outcome."
        for name, counts, state in (("hits", self._hits, "there"), ("misses", self._misses, "not there")):
            for kind, count in sorted(counts.items()):
                yield Reading(
                    f"outrider_run_ahead_{name}", what.format(state), count, is_counter=True, labels={"kind": kind}
                )


def average(before: float | None, latest: float) -> float:
    return latest if before is None else (1.0 - _NEW) * before + _NEW * latest


def runs_ahead(sequence: DraftSequence) -> bool:
    """Whether its window reaches beyond a proposal."""
    return sequence.window > sequence.num_speculative_tokens > 0


def _main_nodes(sequence: DraftSequence, max_model_len: int) -> list[int]:
    """What the main path, within its window, or the proposal after all is accepted, lacks."""
    has_room = sequence.num_committed + sequence.num_drafted < max_model_len
    if sequence.num_drafted >= sequence.window or not has_room:
        return []
    if sequence.shape is None or sequence.num_drafted <= sequence.proposal_depth:
        return [sequence.tip]
    return sequence.missing(max_model_len, sequence.main_node(sequence.proposal_depth + 1))
