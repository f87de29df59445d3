"""Extends sequences by the results of a step that drafts all tokens of a proposal."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.drafters.base import DraftSequence


def extend_by_levels(
    sequence: DraftSequence, node: int, levels: Sequence[tuple[list[int], list[float]]], max_model_len: int
) -> None:
    """Adds `levels` below `node`: the first below `node`, each other one below the first child of the level before.

    A level contains the best tokens of a position and their gaps, which do not depend on earlier drafts. So each other
    node of an owed tree gets the tokens of its depth, too.
    """
    end = node
    for token_ids, gaps in levels:
        sequence.extend(end, token_ids[: sequence.width], gaps[: sequence.width])
        end = sequence.children(end)[0]
    if sequence.shape is None or node >= 0:
        return
    while nodes := [n for n in sequence.missing(max_model_len) if sequence.depth(n) < len(levels)]:
        for other in nodes:
            token_ids, gaps = levels[sequence.depth(other)]
            sequence.extend(other, token_ids[: sequence.width], gaps[: sequence.width])
