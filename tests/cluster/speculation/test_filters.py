"""The weights of the filters: close to the exponential, and made of nothing that a device could round otherwise."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from cluster.speculation.filters import COEFFICIENTS, LN2_HIGH, LN2_LOW, LOG2_E, WEIGHT_BITS, filter_rows, weights

from .logits import random_logits

F32 = np.float32


def weight_by_single_operations(distance: npt.NDArray[np.float32]) -> list[int]:
    """NumPy rounds every product and every sum; the shifts are Python's."""
    power = np.floor(distance * F32(LOG2_E) + F32(0.5))
    rest = (distance - power * F32(LN2_HIGH)) - power * F32(LN2_LOW)
    polynomial = np.full_like(rest, F32(COEFFICIENTS[0]))
    for coefficient in COEFFICIENTS[1:]:
        polynomial = polynomial * rest + F32(coefficient)
    mantissa = polynomial * (rest * rest) + rest + F32(1.0)
    return [
        int(float(m) * 2**24) * 2 ** (WEIGHT_BITS - 24) >> min(63, -int(n))
        for m, n in zip(mantissa, power, strict=True)
    ]


def test_every_operation_is_rounded_by_itself() -> None:
    scores = -random_logits(1, 1, 30_000, 20.0).abs()
    scores[0, 7] = 0.0
    assert weights(scores, torch.zeros(1, 1))[0].tolist() == weight_by_single_operations(scores[0].numpy())


def test_weights_are_the_exponential() -> None:
    scores = -torch.rand(1, 20_000, generator=torch.Generator().manual_seed(2)) * 14
    error = weights(scores, torch.zeros(1, 1)).double() - scores.double().exp() * 2**WEIGHT_BITS
    assert (error.abs() < 1 + 2e-7 * 2**WEIGHT_BITS * scores.double().exp()).all()


def test_the_best_weighs_all_and_what_cannot_be_chosen_nothing() -> None:
    scores = torch.tensor([[3.0, -torch.inf, 3.0 - 28.0, -1e30], [5.0, 5.0, -torch.inf, 4.999999]])
    seen = weights(scores, scores.amax(dim=-1, keepdim=True))
    assert seen[0].tolist() == [2**WEIGHT_BITS, 0, 0, 0]
    assert seen[1, :3].tolist() == [2**WEIGHT_BITS, 2**WEIGHT_BITS, 0]
    assert 0 < seen[1, 3] < 2**WEIGHT_BITS


def test_beside_an_infinite_best_nothing_else_weighs() -> None:
    scores = torch.tensor([[3.0, torch.inf, -torch.inf, 1e30, torch.inf]])
    assert weights(scores, scores.amax(dim=-1, keepdim=True)).tolist() == [[0, 2**WEIGHT_BITS, 0, 0, 2**WEIGHT_BITS]]


def test_a_filter_keeps_the_same_in_any_company_and_order() -> None:
    scores = random_logits(3, 16, 5000).round(decimals=1)  # with equal ones
    filters = {"min_p": torch.full((16,), 0.001), "top_k": torch.full((16,), 900), "top_p": torch.full((16,), 0.95)}
    together = filter_rows(scores, **filters)
    for row in range(16):
        alone = filter_rows(scores[row : row + 1], **{name: column[:1] for name, column in filters.items()})
        assert torch.equal(alone[0], together[row])
    # Among tokens with different scores their order does not matter.
    distinct = random_logits(4, 1, 5000)
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(5))
    kept = filter_rows(distinct, min_p=None, top_k=torch.tensor([5000]), top_p=torch.tensor([0.9]))
    shuffled = filter_rows(distinct[:, order], min_p=None, top_k=torch.tensor([5000]), top_p=torch.tensor([0.9]))
    assert torch.equal(kept[:, order], shuffled)
    assert 10 < int(torch.isfinite(kept).sum()) < 4990
