"""Where the local launcher has drafts made."""

from __future__ import annotations

import logging
import os

import pytest

from cluster.config_file import load_config
from services.launch import place_draft as module
from services.launch.local import LocalCluster
from services.launch.place_draft import place_draft

ON_CPU = ("target.device=cpu", "draft.device=cpu")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_gpu", lambda: False)


@pytest.mark.parametrize(
    ("num_cores", "settings", "placement", "reason"),
    [
        (2, [], "in-process", "one target and its draft share the few cores"),
        (2, ["draft.drafter=layer-skip"], "in-process", "one target and its draft share the few cores"),
        (64, [], "pool", "there are cores for both"),
        (2, ["draft.replicas=2"], "pool", "there are 1 targets and 2 draft workers"),
        (2, ["target.replicas=2"], "pool", "there are 2 targets and 1 draft workers"),
        (2, ["target.engine=simulated", "draft.drafter=simulated"], "pool", "target.engine is simulated"),
        (2, ["target.engine=vllm"], "pool", "target.engine is vllm"),
        (2, ["target.device=cuda"], "pool", "a GPU may be used"),
        (2, ["draft.cpus=[1]"], "pool", "cores or threads are set"),
        (2, ["simulation.round_trip_ms=5"], "pool", "the simulation has a network"),
    ],
)
def test_auto_is_decided_and_said(
    num_cores: int,
    settings: list[str],
    placement: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    with caplog.at_level(logging.INFO):
        assert place_draft(load_config(None, settings)).draft.placement == placement
    (line,) = [record.getMessage() for record in caplog.records if "draft.placement auto" in record.getMessage()]
    assert line.startswith(f"draft.placement auto: {placement}, as {reason}")


def test_a_gpu_at_hand_keeps_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_gpu", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert place_draft(load_config(None, [])).draft.placement == "pool"


@pytest.mark.parametrize("placement", ["pool", "sidecar", "in-process"])
def test_what_is_set_stays(placement: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        config = place_draft(load_config(None, [f"draft.placement={placement}"]))
    assert config.draft.placement == placement
    assert not caplog.records


@pytest.mark.parametrize("num_targets", [1, 2])
def test_a_cluster_that_drafts_in_process_has_no_draft_workers(num_targets: int) -> None:
    settings = ["router.port=0", "draft.placement=in-process", f"target.replicas={num_targets}"]
    cluster = LocalCluster(load_config(None, settings))
    assert cluster.drafts == []
    assert len(cluster.targets) == num_targets
    assert all("draft" not in name for name in cluster.metrics_urls)
