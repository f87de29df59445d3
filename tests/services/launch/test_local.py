"""What the launcher decides before it starts anything."""

from __future__ import annotations

import os

import pytest

from cluster.config_file import load_config
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


@pytest.mark.parametrize(
    ("host", "reached"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("10.0.0.7", "10.0.0.7")],
)
def test_metrics_pages_are_found_where_they_listen(host: str, reached: str) -> None:
    settings = [f"target.metrics_host={host!r}", "target.metrics_port=9100", "router.port=0"]
    cluster = LocalCluster(load_config(None, settings))
    assert cluster.targets[0].metrics_url == f"http://{reached}:9100/metrics"
    assert cluster.drafts[0].metrics_url.startswith("http://127.0.0.1:")
