"""The kinds of steps that metrics distinguish."""

from __future__ import annotations

import pytest

from cluster.telemetry.metrics import StepTime


@pytest.mark.parametrize(
    ("has_prompt", "has_drafts", "kind"),
    [(True, True, "prefill"), (True, False, "prefill"), (False, True, "verify"), (False, False, "decode")],
)
def test_a_step_with_a_prompt_is_a_prefill_whatever_else_it_has(has_prompt: bool, has_drafts: bool, kind: str) -> None:
    assert StepTime.kind(has_prompt=has_prompt, has_drafts=has_drafts) == kind
