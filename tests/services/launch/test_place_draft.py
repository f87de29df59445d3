"""Where the local launcher has drafts made."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.config.file import load_config
from cluster.errors import ConfigurationError
from services.launch import place_draft as module
from services.launch.checks import check_models
from services.launch.host_cores import Core
from services.launch.local import LocalCluster
from services.launch.place_draft import place_draft
from tests.near_pairs import DRAFT, padded, without_tokens

SHARED = "one target and its draft share the few cores of this machine"
OWN_CORES = "the target has a GPU, the draft the CPU, and enough cores are free for it"


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_gpu", lambda: False)


@pytest.mark.parametrize(
    ("num_cores", "settings", "placement", "reason"),
    [
        (2, [], "in-process", SHARED),
        (64, [], "pool", "the machine has cores for both"),
        (2, ["draft.replicas=2"], "pool", "the cluster has 1 targets and 2 draft workers"),
        (2, ["target.replicas=2"], "pool", "the cluster has 2 targets and 1 draft workers"),
        (2, ["target.engine=simulated", "draft.drafter=simulated"], "pool", "target.engine is simulated"),
        (2, ["target.engine=vllm"], "pool", "target.engine is vllm"),
        (2, ["target.device=cuda"], "pool", "a GPU may be used"),
        (8, ["target.device=cuda", "draft.device=cpu"], "host-cpu", OWN_CORES),
        (8, ["target.engine=vllm", "target.device=cuda", "draft.device=cpu"], "host-cpu", OWN_CORES),
        (7, ["target.device=cuda", "draft.device=cpu"], "pool", "a GPU may be used"),
        (64, ["target.device=cuda"], "pool", "a GPU may be used"),
        (64, ["target.device=cuda", "draft.device=cpu", "draft.cpus=[1]"], "pool", "a GPU may be used"),
        (64, ["draft.device=cpu"], "pool", "the machine has cores for both"),
        (2, ["draft.cpus=[1]"], "pool", "cores or threads are set"),
        (2, ["simulation.round_trip_ms=5"], "pool", "the simulation has a network"),
    ],
)
def test_auto_is_decided(
    num_cores: int, settings: list[str], placement: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    monkeypatch.setattr(module, "read_cores", lambda: [Core((cpu,)) for cpu in range(num_cores)])
    config, why = place_draft(load_config(None, settings))
    assert (config.draft.placement, why) == (placement, reason)


@pytest.mark.parametrize(
    ("num_gpus", "runner", "settings", "placement"),
    [
        (1, None, [], "in-process"),
        (1, "1", [], "in-process"),
        (1, "0", [], "pool"),
        (1, None, ["target.lora_root=/adapters"], "pool"),
        (2, "1", [], "pool"),
        (1, "1", ["draft.device=cpu"], "pool"),
        (1, "1", ["target.tensor_parallel_size=2"], "pool"),
        (1, "1", ["draft.drafter=ngram"], "pool"),
        (1, "1", ["draft.placement=pool"], "pool"),
    ],
)
def test_a_draft_that_shares_the_gpu_of_a_vllm_target_is_in_its_process(
    num_gpus: int, runner: str | None, settings: list[str], placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_num_gpus", lambda: num_gpus)
    monkeypatch.setattr(module, "read_cores", lambda: [Core((cpu,)) for cpu in range(2)])
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if runner is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    config, _ = place_draft(load_config(None, ["target.engine=vllm", "target.device=cuda", *settings]))
    assert config.draft.placement == placement


@pytest.mark.parametrize(
    ("num_gpus", "settings", "placement"),
    [
        (1, [], "in-process"),
        (1, ["draft.drafter=self-int4"], "in-process"),
        (1, ["draft.drafter=ngram"], "pool"),
        (1, ["draft.device=cpu"], "pool"),
        (1, ["target.replicas=2"], "pool"),
        (2, [], "pool"),
    ],
)
def test_a_draft_that_shares_the_gpu_of_our_engine_is_in_its_process(
    num_gpus: int, settings: list[str], placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_num_gpus", lambda: num_gpus)
    monkeypatch.setattr(module, "read_cores", lambda: [Core((cpu,)) for cpu in range(2)])
    config, _ = place_draft(load_config(None, ["target.device=cuda", *settings]))
    assert config.draft.placement == placement


@pytest.mark.parametrize(
    "make", [lambda folder: padded(DRAFT, folder, [None]), lambda folder: without_tokens(DRAFT, folder, ["Ġthe"])]
)
def test_a_draft_whose_vocabulary_vllm_refuses_is_in_a_pool(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_num_gpus", lambda: 1)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    draft = make(tmp_path / "draft")
    settings = ["target.engine=vllm", "target.device=cuda", f"draft.model={draft}"]
    config, _ = place_draft(load_config(None, settings))
    assert config.draft.placement == "pool"
    check_models(config)
    with pytest.raises(ConfigurationError, match=r"draft\.placement pool"):
        check_models(load_config(None, [*settings, "draft.placement=in-process"]))


def test_the_log_says_what_was_decided(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with caplog.at_level(logging.INFO):
        cluster = LocalCluster(load_config(None, ["router.port=0"]))
    assert cluster.drafts == []
    lines = [record.getMessage() for record in caplog.records]
    assert "draft.placement auto: in-process, as one target and its draft share the few cores of this machine" in lines


def test_a_gpu_at_hand_keeps_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_gpu", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    config, _ = place_draft(load_config(None, []))
    assert config.draft.placement == "pool"


@pytest.mark.parametrize("placement", ["pool", "sidecar", "host-cpu", "in-process"])
def test_what_is_set_stays(placement: str) -> None:
    config = load_config(None, [f"draft.placement={placement}"])
    assert place_draft(config) == (config, None)


@pytest.mark.parametrize("num_targets", [1, 2])
def test_a_cluster_that_drafts_in_process_has_no_draft_workers(num_targets: int) -> None:
    settings = ["router.port=0", "draft.placement=in-process", f"target.replicas={num_targets}"]
    cluster = LocalCluster(load_config(None, settings))
    assert cluster.drafts == []
    assert len(cluster.targets) == num_targets
    assert all("draft" not in name for name in cluster.metrics_urls)
