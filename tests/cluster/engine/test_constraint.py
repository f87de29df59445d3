"""Tests of the tokens that constraints allow along chains and trees of drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from cluster.constraints import Constraints
from cluster.engine.constraint import TokenConstraint
from cluster.speculation.drafts import Drafts

VOCAB_SIZE = 70  # not a multiple of 32
END = 5


class EvenThenOdd:
    """Stands for a grammar: even tokens, then odd ones, then the end. It counts what is taken back."""

    error: str | None = None

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def accept_token(self, token_id: int, /) -> bool:
        if token_id not in self._allowed():
            return False
        self.tokens.append(token_id)
        return True

    def rollback(self, num_tokens: int, /) -> None:
        del self.tokens[-num_tokens:]

    def is_terminated(self) -> bool:
        return self.tokens[-1:] == [END]

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int, /) -> bool:
        allowed = self._allowed()
        for word in range(bitmask.shape[1]):
            bits = sum(1 << bit for bit in range(32) if word * 32 + bit in allowed)
            bitmask[index, word] = bits - (1 << 32) if bits >= 1 << 31 else bits
        return True

    def likely_token_ids(self, most: int, /) -> list[int]:
        return ([40, 42, 7] if self.tokens else [2])[:most]

    def _allowed(self) -> set[int]:
        if not self.tokens or self.tokens[-1] % 2 == 0:
            return {token for token in range(VOCAB_SIZE) if token != END} - ({1, 3} if not self.tokens else set())
        return {token for token in range(VOCAB_SIZE) if token % 2}


def allowed_by(masks: torch.Tensor | None, row: int) -> set[int]:
    if masks is None:
        return set(range(VOCAB_SIZE))
    assert masks.shape[1] == 3
    return {token for token in range(VOCAB_SIZE) if int(masks[row, token // 32]) >> (token % 32) & 1}


def new(constraints: Constraints, matcher: EvenThenOdd | None = None, ends: Sequence[int] = (END,)) -> TokenConstraint:
    return TokenConstraint(constraints, matcher, VOCAB_SIZE, ends)


def test_nothing_is_no_constraint() -> None:
    assert TokenConstraint.of(Constraints(), None, VOCAB_SIZE, (END,), ()) is None


def test_allowed_tokens() -> None:
    constraint = new(Constraints(allowed_token_ids=(3, 40, 69)))
    assert allowed_by(constraint.masks(Drafts()), 0) == {3, 40, 69}
    assert constraint.cut(Drafts([40, 41, 3])).token_ids == [40]


def test_least_length_and_then_all() -> None:
    constraint = new(Constraints(min_tokens=2), ends=(5, 6))
    masks = constraint.masks(Drafts([1, 2]))
    everything = set(range(VOCAB_SIZE))
    assert [allowed_by(masks, row) for row in range(3)] == [everything - {5, 6}, everything - {5, 6}, everything]
    assert constraint.cut(Drafts([1, 5])).token_ids == [1]
    constraint.commit(1)
    constraint.commit(2)
    assert constraint.masks(Drafts([5])) is None


def test_bad_words() -> None:
    constraint = new(Constraints(bad_words=((7,), (1, 2, 3))))
    masks = constraint.masks(Drafts([1, 2, 4]))
    everything = set(range(VOCAB_SIZE))
    assert [allowed_by(masks, row) for row in range(4)] == [everything - {7}] * 2 + [
        everything - {7, 3},
        everything - {7},
    ]
    assert constraint.cut(Drafts([1, 2, 3, 4])).token_ids == [1, 2]
    assert constraint.commit(1)
    assert constraint.commit(2)
    assert not constraint.commit(3)
    assert constraint.error is not None


def test_a_tree_is_cut_with_what_follows() -> None:
    constraint = new(Constraints(allowed_token_ids=(1, 2, 3)))
    tree = Drafts([1, 9, 2, 3, 9], [-1, -1, 0, 1, 2])
    kept = constraint.cut(tree)
    assert (list(kept.token_ids), kept.parents) == ([1, 2], None)


@pytest.mark.parametrize(
    ("proposed", "most", "drafts"),
    [
        ([], 4, [2]),
        ([6], 4, [6, 40, 42, 7]),
        ([6], 2, [6, 40]),
        ([6], 1, [6]),
        ([6, END, 8], 9, [6, 40, 42, 7]),
        ([1], 4, [2]),
        ([6, 7], 9, [6, 7]),  # 40 may not follow
        ([6, 7, END], 9, [6, 7, END]),  # the text has ended
    ],
)
def test_a_grammar_drafts_where_the_proposal_ends_or_is_forbidden(
    proposed: list[int], most: int, drafts: list[int]
) -> None:
    matcher = EvenThenOdd()
    constraint = new(Constraints(), matcher)
    assert list(constraint.drafts(Drafts(proposed), most).token_ids) == drafts
    assert (matcher.tokens, constraint.num_generated) == ([], 0)


def test_other_constraints_cut_what_a_grammar_drafts() -> None:
    constraint = new(Constraints(bad_words=((40, 42),)), EvenThenOdd())
    assert list(constraint.drafts(Drafts([6]), 9).token_ids) == [6, 40]


def test_a_grammar_adds_nothing_to_a_tree() -> None:
    constraint = new(Constraints(), EvenThenOdd())
    kept = constraint.drafts(Drafts([2, 4, END], [-1, -1, 0]), 9)
    assert (list(kept.token_ids), kept.parents) == ([2, 4], [-1, -1])


@pytest.mark.parametrize("seed", range(100))
def test_masks_of_drafts_are_those_after_committing_them(seed: int) -> None:
    """Constraints and trees are random, with a grammar. Computing masks does not change the state."""
    choose = random.Random(seed)
    constraints = Constraints(
        allowed_token_ids=tuple(choose.sample(range(VOCAB_SIZE), 60)),
        bad_words=tuple(tuple(choose.choices(range(20), k=choose.randint(1, 3))) for _ in range(4)),
        min_tokens=choose.randint(0, 4),
    )
    parents = [choose.randint(-1, node - 1) for node in range(12)]
    tree = Drafts.tree([choose.randrange(20) for _ in parents], parents)
    matcher = EvenThenOdd()
    constraint = new(constraints, matcher)
    kept = constraint.cut(tree)
    masks = constraint.masks(kept)
    assert matcher.tokens == []

    parents = list(range(-1, len(kept) - 1)) if kept.parents is None else list(kept.parents)
    for node in range(-1, len(kept)):
        path: list[int] = []
        at = node
        while at >= 0:
            path.insert(0, kept.token_ids[at])
            at = parents[at]
        other = new(constraints, EvenThenOdd())
        assert all(other.commit(token) for token in path)
        if not other.is_complete:
            assert allowed_by(masks, node + 1) == allowed_by(other.masks(Drafts()), 0)


def test_a_grammar_that_exceeds_its_limits_ends_the_sequence() -> None:
    matcher = EvenThenOdd()
    constraint = new(Constraints(), matcher)
    constraint.masks(Drafts())
    assert constraint.error is None
    matcher.error = "too many items"
    constraint.masks(Drafts())
    assert constraint.error is not None
    assert "too many items" in constraint.error.message
    assert not constraint.commit(2)
