"""Requests that come and go are not slower for the drafts that they get."""

from __future__ import annotations

import pytest

from bench.capacity import PLAIN
from bench.floor import BAR, cases, run


@pytest.mark.parametrize("name", ["pool, 0.2 ms away", "pool, 10 ms away"])
def test_the_controller_never_costs_much(name: str) -> None:
    (plain, _), (auto, _) = (run(cases()[which], 48) for which in (PLAIN, name))
    assert auto > BAR * plain
