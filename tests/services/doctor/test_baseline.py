from __future__ import annotations

import pytest

from services.doctor.cli import survival_of


@pytest.mark.parametrize(
    ("told", "survival"),
    [([0.8, 0.0, 0.5, 0.0, 0.0], (0.8, 0.0, 0.5)), ([0.0, 0.0], ()), ([], ())],
)
def test_an_earlier_survival_goes_as_deep_as_anything_was_committed(
    told: list[float], survival: tuple[float, ...]
) -> None:
    report = {"suitability": [{"temperature": 0.0, "survival": told}, {"temperature": 1.0, "survival": [0.1]}]}
    assert survival_of(report) == survival
