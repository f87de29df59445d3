"""Whole clusters: router, target and draft workers as processes, called over HTTP."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.config import Config
from cluster.config.file import load_config
from cluster.engine.cpu_kernels import LANES_VARIABLE, InstructionSet
from cluster.model_folder import resolve_model_folder
from services.launch.local import LocalCluster

READY_TIMEOUT_SECONDS = 600
# By default kernels use the widest registers of a processor: 16 lanes with AVX-512, and 8 with AVX2. With 4 there is no
# instruction for FMA, and each step of the bundled target would take 0.6 s.
OTHER_LANES = {LANES_VARIABLE: "8"} if InstructionSet.AMX_EMULATED.is_supported else {}
# By default drafts that take over 50 ms are late, as they often do on a busy machine. For tests that expect drafts.
PATIENT = "speculation.draft_timeout_ms=60000"


def cluster_config(*overrides: str) -> Config:
    """The default configuration in float32, on a free port, with draft workers of their own."""
    settings = ("router.port=0", "target.dtype=float32", "draft.dtype=float32", "draft.placement=pool")
    return load_config(None, [*settings, *overrides])


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """The bundled pair."""
    with LocalCluster(cluster_config(PATIENT)) as running:
        running.wait_ready(READY_TIMEOUT_SECONDS)
        yield running


@pytest.fixture(scope="session")
def two_of_each() -> Iterator[LocalCluster]:
    """Two targets and two drafts of the bundled pair, for tests that kill some of them and wait for their return.

    With AVX-512 the targets use registers of different widths, like targets on different processors.
    """
    # A controller would stop asking a draft that is late, which test_chaos.py covers.
    settings = ("target.replicas=2", "draft.replicas=2", "target.drain_seconds=0.2", "speculation.controller=fixed")
    with LocalCluster(cluster_config(*settings), {"target 1": OTHER_LANES}) as running:
        running.wait_ready(READY_TIMEOUT_SECONDS)
        yield running


@pytest.fixture(scope="session")
def random_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft with the bundled one's shape and tokenizer, and random weights: it is nearly always wrong."""
    bundled = resolve_model_folder(Config().draft.model)
    folder = tmp_path_factory.mktemp("random-draft")
    torch.manual_seed(20)
    LlamaForCausalLM(LlamaConfig.from_pretrained(bundled)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled / name, folder)
    return folder


@pytest.fixture(scope="session")
def cluster_with_random_draft(random_draft: Path) -> Iterator[LocalCluster]:
    with LocalCluster(cluster_config(f"draft.model={random_draft}")) as running:
        running.wait_ready(READY_TIMEOUT_SECONDS)
        yield running
