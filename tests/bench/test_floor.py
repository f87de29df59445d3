"""Drafts never cost speed where requests come and go, are far away, wrong, or vanish."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.floor import BAR, HARDSHIPS, Hardship, cases, endure, run
from cluster.planning.options import PLAIN
from tests.soak import length

_SECONDS_IN_CI = {  # the whole list takes minutes
    "8 clients, prompts of 4,096": 1800.0,
    "the draft worker vanishes and is back": 120.0,
}
_SHORT = [replace(one, seconds=_SECONDS_IN_CI[one.name]) for one in HARDSHIPS if one.name in _SECONDS_IN_CI]


def test_a_full_cluster_is_not_slower_for_its_drafts() -> None:
    plain, auto = (
        run(cases()[which], 48, length(60.0, 120.0)).tokens_per_second for which in (PLAIN, "pool, 10 ms away")
    )
    assert auto > BAR * plain


@pytest.mark.parametrize("hardship", length(_SHORT, list(HARDSHIPS)), ids=lambda one: one.name)
def test_nothing_is_lost_under_hardship(hardship: Hardship) -> None:
    without, drafted = endure(hardship)
    assert drafted.tokens_per_second >= BAR * without.tokens_per_second
    assert drafted.between_tokens_p99 <= hardship.pause_bar * without.between_tokens_p99
