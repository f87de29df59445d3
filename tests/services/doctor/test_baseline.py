from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.errors import ConfigurationError
from services.doctor.cli import read_baseline, survival_of


@pytest.mark.parametrize(
    ("told", "survival"),
    [([0.8, 0.0, 0.5, 0.0, 0.0], (0.8, 0.0, 0.5)), ([0.0, 0.0], ()), ([], ())],
)
def test_an_earlier_survival_goes_as_deep_as_anything_was_committed(
    told: list[float], survival: tuple[float, ...]
) -> None:
    report = {"suitability": [{"temperature": 0.0, "survival": told}, {"temperature": 1.0, "survival": [0.1]}]}
    assert survival_of(report, 0.0) == survival


def test_a_baseline_whose_drafts_were_never_accepted_is_refused(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"suitability": [{"temperature": 0.0, "survival": []}]}))
    with pytest.raises(ConfigurationError, match=r"report\.json is of a cluster whose drafts were never accepted"):
        read_baseline(report, 0.0)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ([{"temperature": 1.0, "survival": [0.8]}], "it has the temperatures 1, and not 0"),
        ([{"temperature": 0.0, "survival": [1.5]}], "was not written by"),
        ([{"temperature": 0.0, "survival": [float("nan")]}], "was not written by"),
        (3, "was not written by"),
    ],
)
def test_a_baseline_that_cannot_be_compared_is_refused(told: object, why: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"suitability": told}))
    with pytest.raises(ConfigurationError, match=why):
        read_baseline(report, 0.0)
