"""Which draft tokens a target's choices confirm."""

from __future__ import annotations

from collections.abc import Sequence


def count_accepted(draft_token_ids: Sequence[int], choices: Sequence[int]) -> int:
    """How many leading draft tokens equal the target's choice at their position.

    `choices[i]` is what the target chose after the prefix and drafts 0 .. i-1, so there is one more choice than
    drafts, and a choice means something only while every draft before it was accepted. The round commits
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
