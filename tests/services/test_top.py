"""Tests of the lines of `outrider top`."""

from __future__ import annotations

import pytest

from services.running_cluster.pages import MetricsPage
from services.top.view import Change, Look
from tests.services.doctor.test_checks import facts


def look(at: float, *reasons: str) -> Look:
    """`reasons`: plain decodes by reason on the page of each target."""
    pages = [MetricsPage(text) for text in reasons]
    return Look(at, MetricsPage(""), pages, [MetricsPage("")])


def decodes(**counts: int) -> str:
    name = "outrider_plain_decodes_total"
    return "".join(f'{name}{{reason="{reason}"}} {count}\n' for reason, count in counts.items())


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ((decodes(late=90), ""), (decodes(late=91, does_not_pay=2), decodes(does_not_pay=7)), ": does_not_pay (90 %"),
        (("", ""), ("", ""), ""),
        ((decodes(late=9), ""), (decodes(late=2), ""), ""),  # restarted
    ],
)
def test_a_cluster_that_verifies_no_drafts_shows_why(
    before: tuple[str, ...], after: tuple[str, ...], shown: str
) -> None:
    lines = Change(facts(1, 1), look(0.0, *before), look(2.0, *after)).lines()
    (drafts,) = (line for line in lines if line.startswith("drafts "))
    assert drafts == f"drafts     none verified{shown}" + (" of plain decodes)" if shown else "")
