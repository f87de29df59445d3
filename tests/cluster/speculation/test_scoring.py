"""Log-probabilities of tokens."""

from __future__ import annotations

import math

import pytest
import torch

from cluster.logprobs import TokenLogprobs, joined
from cluster.speculation import scoring
from cluster.speculation.scoring import token_logprobs


@pytest.mark.parametrize("width", [0, 1, 5, 40])
def test_ranks_and_the_likeliest(width: int) -> None:
    logits = torch.randn(9, 40, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    expected = logits.float().log_softmax(-1)
    rows, tokens = [8, 0, 3, 3], [39, 0, 17, 18]
    scores = token_logprobs(logits, rows, tokens, width)
    assert len(scores) == 4
    for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        assert scores.logprobs[index] == pytest.approx(expected[row, token].item(), abs=1e-6)
        assert scores.ranks[index] == 1 + sum(expected[row] > expected[row, token]).item()
        values, order = expected[row].sort(descending=True, stable=True)
        assert [token for token, _ in scores.top(index)] == order[:width].tolist()
        assert [value for _, value in scores.top(index)] == pytest.approx(values[:width].tolist(), abs=1e-6)


def test_among_equals_the_lowest_comes_first() -> None:
    scores = token_logprobs(torch.zeros(1, 4096), [0], [4095], 5)
    assert [token for token, _ in scores.top(0)] == [0, 1, 2, 3, 4]
    assert scores.ranks == [1]


def test_beside_infinite_logits_nothing_else_has_a_share() -> None:
    inf = float("inf")
    scores = token_logprobs(torch.tensor([[1.0, inf, -inf], [inf, 2.0, inf], [0.0, 0.0, -inf]]), range(3), [1, 1, 0], 2)
    assert scores.logprobs == pytest.approx([0.0, -inf, math.log(0.5)])
    assert scores.ranks == [1, 3, 1]
    assert scores.top(1) == [(0, pytest.approx(math.log(0.5))), (2, pytest.approx(math.log(0.5)))]


def test_many_rows_are_worked_on_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(50, 64)
    whole = token_logprobs(logits, range(50), [5] * 50, 3)
    monkeypatch.setattr(scoring, "_VALUES_AT_ONCE", 64 * 7)
    assert token_logprobs(logits, range(50), [5] * 50, 3) == whole


def test_parts_and_joints() -> None:
    whole = token_logprobs(torch.randn(6, 20), range(6), [1, 2, 3, 4, 5, 6], 4)
    again = joined(whole.part(0, 2), whole.part(2, 6))
    assert again == whole
    assert whole.part(3, 5, 2).top(1) == whole.top(4)[:2]
    assert joined(None, whole) is whole
    assert joined(whole, None) is whole
    empty = TokenLogprobs(0)
    empty.extend(TokenLogprobs(3))
    assert len(empty) == 0
