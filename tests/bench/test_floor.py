"""Drafts never cost speed where requests come and go, are far away, wrong, or vanish."""

from __future__ import annotations

import pytest

from bench.capacity import PLAIN
from bench.floor import BAR, HARDSHIPS, Hardship, cases, endure, run

_IN_CI = (  # the whole list takes minutes
    "8 clients, prompts of 4,096",
    "acceptance 0.3, 8 clients",
    "drafts turn bad and good again",
    "the draft worker vanishes and is back",
)


def test_a_full_cluster_is_not_slower_for_its_drafts() -> None:
    plain, auto = (run(cases()[which], 48).tokens_per_second for which in (PLAIN, "pool, 10 ms away"))
    assert auto > BAR * plain


@pytest.mark.parametrize("hardship", [one for one in HARDSHIPS if one.name in _IN_CI], ids=lambda one: one.name)
def test_nothing_is_lost_under_hardship(hardship: Hardship) -> None:
    without, drafted = endure(hardship)
    assert drafted.tokens_per_second >= BAR * without.tokens_per_second
    assert drafted.between_tokens_p99 <= hardship.pause_bar * without.between_tokens_p99
