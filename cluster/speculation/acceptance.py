"""Counts the draft tokens that a target's choices confirm."""

from __future__ import annotations

from collections.abc import Sequence


def count_accepted(draft_token_ids: Sequence[int], choices: Sequence[int]) -> int:
    """Returns the number of leading draft tokens that equal the target's choice at their position.

    `choices[i]` is the target's choice after the prefix and drafts 0 .. i-1, so there is one more choice than
    drafts. A choice is valid only if every draft before it was accepted. The round commits
    `choices[: accepted + 1]`: the accepted drafts (which equal their choices) and the bonus token. With coupled
    noise this is an exact sample of the target's own decoding (Daliri, Musco, Suresh, arXiv 2408.07978,
    section 3): it *is* the target's decoding.
    """
    assert len(choices) == len(draft_token_ids) + 1
    accepted = 0
    for draft, choice in zip(draft_token_ids, choices, strict=False):
        if draft != choice:
            break
        accepted += 1
    return accepted


def accepted_path(token_ids: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> list[int]:
    """Returns the path of nodes that the target's choices confirm, from the root on.

    Node 0 is the root: the last committed token. `choices[i]` is the target's choice after node i and the path to
    it. The walk goes to the child that equals the choice. The round commits the choices of the nodes on the
    path; the last one is the bonus token. Siblings must differ.
    """
    assert len(token_ids) == len(parents) == len(choices)
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, token_ids, strict=True))}
    path = [0]
    while (child := children.get((path[-1], choices[path[-1]]))) is not None:
        path.append(child)
    return path
