"""Two vLLM targets and their drafts, shared by all tests here: an engine takes half a minute to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.config.workers import TargetConfig
from cluster.engine.runner import ModelRunner
from tests.collector import Collector, collecting
from tests.soak import length
from tests.system.cases import sampled_cases
from tests.system.client import Case
from tests.system.near_ties import NearTieJudge
from tests.system.vllm.programs import Programs, two_targets

NUM_PROMPTS = length(20, 40)
SETTINGS = {
    "speculation.draft_timeout_ms": 5000,  # on a busy machine drafts are often late by the default of 50
    "target.engine": "vllm",
    "target.engine_args": "{enforce_eager: true}",
    "target.max_num_seqs": 8,
    "target.max_model_len": 1024,
    "target.kv_cache_bytes": 32 * 2**20,
    "target.drain_seconds": 0.2,
}


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    """Gets the traces of `programs`."""
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="package")
def programs(tmp_path_factory: pytest.TempPathFactory, random_draft: Path, collector: Collector) -> Iterator[Programs]:
    settings = SETTINGS | {"tracing.endpoint": collector.url}
    with two_targets(tmp_path_factory.mktemp("vllm"), random_draft, **settings) as programs:
        yield programs


@pytest.fixture(scope="package")
def cases() -> list[Case]:
    return sampled_cases(NUM_PROMPTS)


@pytest.fixture(scope="package")
def judge() -> NearTieJudge:
    torch.set_num_threads(1)
    config = TargetConfig(dtype="float32", device="cpu")
    return NearTieJudge(ModelRunner.from_config(config))
