"""How the launcher divides a device's memory."""

from __future__ import annotations

import pytest

from cluster.config.file import load_config
from cluster.errors import ConfigurationError
from services.launch import memory, place_draft
from services.launch.memory import share_memory


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_draft, "_has_gpu", lambda: True)
    monkeypatch.setattr(memory, "_gpu_gigabytes", lambda: 1.0)


def test_workers_on_a_cpu_divide_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_draft, "_has_gpu", lambda: False)
    shared = share_memory(load_config(None, ["target.replicas=2", "draft.placement=pool"]))
    assert shared.target.memory_utilization == shared.draft.memory_utilization == pytest.approx(0.3)
    alone = share_memory(load_config(None, ["draft.placement=in-process"]))
    assert alone.target.memory_utilization == 0.9


@pytest.mark.usefixtures("gpu")
def test_caches_on_a_gpu_hold_the_same_number_of_tokens() -> None:
    shared = share_memory(load_config(None, ["target.replicas=2", "draft.placement=pool"]))
    target, draft = shared.target.kv_cache_bytes, shared.draft.kv_cache_bytes
    assert target is not None
    assert draft is not None
    # A token takes 2 (keys and values) * layers * KV heads * head size * 2 bytes.
    assert target / (2 * 6 * 128 * 2) == pytest.approx(draft / (2 * 2 * 192 * 2), rel=0.01)
    used = 2 * shared.target.memory_utilization + shared.draft.memory_utilization
    assert used == pytest.approx(0.9, abs=0.01)


@pytest.mark.usefixtures("gpu")
def test_a_lone_worker_and_configured_sizes_keep_their_settings() -> None:
    for settings in (["draft.placement=in-process"], ["draft.placement=pool", "target.kv_cache_bytes=1000000"]):
        config = load_config(None, settings)
        assert share_memory(config) == config


@pytest.mark.usefixtures("gpu")
def test_models_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_gpu_gigabytes", lambda: 0.02)
    with pytest.raises(ConfigurationError, match="leave no memory for KV caches"):
        share_memory(load_config(None, ["draft.placement=pool"]))
