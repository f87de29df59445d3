"""Sizes of KV caches on hosts and GPUs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cluster.config.workers import TargetConfig
from cluster.engine import host_memory
from cluster.engine.host_memory import available_bytes, host_cache_bytes, usable_length
from cluster.engine.memory_plan import GB, Budget, Memory, PlannedModel, Tenant

TOKEN = 1000  # bytes


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with 10 MB available, and a folder for its cgroup."""
    (tmp_path / "meminfo").write_text("MemTotal: 20000 kB\nMemAvailable: 10000 kB\n")
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    return tmp_path


def test_a_cache_has_room_for_a_whole_context_and_ordinary_streams(host: Path) -> None:
    (host / "meminfo").write_text("MemAvailable: 100000000 kB\n")
    worker = TargetConfig(max_num_seqs=8)
    assert host_cache_bytes(worker, 131_072, TOKEN) == (131_072 + 8 * 1024) * TOKEN
    assert host_cache_bytes(worker, 512, TOKEN) == 9 * 512 * TOKEN, "no stream is longer than the longest"


def test_a_cache_takes_at_most_half_of_its_share_of_the_available_memory(host: Path) -> None:
    worker = TargetConfig(memory_utilization=0.8)
    assert host_cache_bytes(worker, 131_072, TOKEN) == int(0.4 * 10_240_000)


def test_a_container_has_its_own_limit(host: Path) -> None:
    assert available_bytes() == 10_240_000
    (host / "memory.current").write_text("3000000\n")
    (host / "memory.max").write_text("max\n")
    assert available_bytes() == 10_240_000
    (host / "memory.max").write_text("5000000\n")
    assert available_bytes() == 2_000_000


def test_a_short_cache_shortens_sequences_and_names_the_size_that_would_do(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert usable_length(TargetConfig(), 2048, 128, TOKEN) == 2048
        assert not caplog.records
        assert usable_length(TargetConfig(), 2000, 100, TOKEN) == 1600
    assert "set target.kv_cache_bytes to 2000000 to serve them" in caplog.text


def budget(gigabytes: float, *specs: str) -> Budget:
    models = tuple(Tenant(f"model {index}", PlannedModel.parse(spec), 0) for index, spec in enumerate(specs))
    return Budget(models, Memory(gigabytes, 0.9, 16))


# Gigabytes of the weights (parameters times two bytes), and bytes of a token's KV, from the published configurations.
MODELS = {
    "8.03B/32x8x128:bf16": (16.06, 131_072),  # Llama-3.1-8B
    "8.19B/36x8x128:bf16": (16.38, 147_456),  # Qwen3-8B
    "13.02B/40x40x128:bf16": (26.04, 819_200),  # Llama-2-13B
}


@pytest.mark.parametrize("gigabytes", [24, 80])
@pytest.mark.parametrize("model", MODELS)
def test_published_models_alone_on_a_card(model: str, gigabytes: int) -> None:
    weights, token_bytes = MODELS[model]
    expected = max(0.0, 0.9 * gigabytes - weights)
    (alone,) = budget(gigabytes, model).cache_shares()
    assert alone / token_bytes == pytest.approx(expected * GB / token_bytes, rel=0.01)
    assert (alone == 0) == (gigabytes == 24 and model.startswith("13")), "only 13B does not fit, on the small card"


@pytest.mark.parametrize("model", MODELS)
def test_published_models_share_a_card_with_a_draft(model: str) -> None:
    weights, token_bytes = MODELS[model]
    target, draft = budget(80, model, "1B:bf16").cache_shares()
    assert target + draft == pytest.approx((72 - weights - 2.0) * GB, rel=0.01)
    assert target / token_bytes == pytest.approx(draft / 32_768), "both hold the same number of tokens"
