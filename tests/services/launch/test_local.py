"""What the launcher decides before it starts anything."""

from __future__ import annotations

import os

import pytest

from cluster.config import load_config
from services.launch.local import LocalCluster


@pytest.mark.parametrize(
    ("num_cores", "overrides", "max_run_ahead"),
    [
        (2, [], 0),
        (64, [], None),
        (2, ["speculation.max_run_ahead=7"], 7),
        (2, ["draft.cpus=[1]"], None),
        (2, ["speculation.num_speculative_tokens=0"], None),
    ],
)
def test_a_draft_on_the_targets_cores_does_not_run_ahead(
    num_cores: int, overrides: list[str], max_run_ahead: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    cluster = LocalCluster(load_config(None, ["router.port=0", *overrides]))
    assert cluster.config.speculation.max_run_ahead == max_run_ahead
