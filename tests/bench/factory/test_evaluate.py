"""Acceptance, as it is measured and as it is counted."""

import pytest
from torch import Tensor

from bench.factory.evaluate import acceptance_length, measure_acceptance
from bench.factory.models import ModelShape, build_model
from services.training.traffic import TEMPERATURES

YES, NO = True, False


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_model_accepts_itself_entirely(tiny_shape: ModelShape, stream: Tensor, temperature: float) -> None:
    model = build_model(tiny_shape, 0).train(False)
    result = measure_acceptance(model, model, stream, 6, temperature, 0, (8, 12), 20)
    assert result.acceptance_rate == 1.0
    assert result.acceptance_length == 5.0
    assert result.num_prompts == 6
    assert result.num_tokens == 6 * 20


def test_a_draft_that_wants_the_opposite_is_never_accepted(tiny_shape: ModelShape, stream: Tensor) -> None:
    target, draft = build_model(tiny_shape, 0).train(False), build_model(tiny_shape, 0).train(False)
    draft.model.norm.weight.data.neg_()
    result = measure_acceptance(target, draft, stream, 6, 0.0, 0, (8, 12), 20)
    assert result.acceptance_rate == 0.0
    assert result.acceptance_length == 1.0


@pytest.mark.parametrize(
    ("matches", "expected"),
    [
        ([YES] * 10, 5.0),
        ([NO] * 10, 1.0),
        ([YES, NO, YES, YES, NO, NO, NO], 2.5),  # rounds of 2 and 3; the rest is too short
    ],
)
def test_acceptance_length_counts_complete_rounds(matches: list[bool], expected: float) -> None:
    assert acceptance_length([matches], 4) == expected
