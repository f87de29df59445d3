"""Draft with a slightly different vocabulary than the target's, in a cluster of processes."""

from __future__ import annotations

import pytest

from bench.workload import read_counters
from services.launch.local import LocalCluster
from tests.near_pairs import DRAFT, permuted, without_tokens
from tests.system.cases import sampled_cases
from tests.system.client import complete_all
from tests.system.conftest import PATIENT, READY_TIMEOUT_SECONDS, cluster_config


def test_the_tokens_are_those_without_speculation(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("pair")
    lacking = without_tokens(DRAFT, folder / "lacking", ["Ġself", "Ġthe", "):Ċ"])
    draft = permuted(str(lacking), folder / "draft", {0: 1, 1: 2, 2: 0, 300: 301, 301: 300})
    settings = [f"draft.model={draft}", "target.dtype=float32", "draft.dtype=float32"]
    with LocalCluster(cluster_config(PATIENT, *settings)) as running:
        running.wait_ready(READY_TIMEOUT_SECONDS)
        cases = sampled_cases(12)
        plain = complete_all(running.url, cases, num_speculative_tokens=0)
        for k in (1, 6):
            assert complete_all(running.url, cases, num_speculative_tokens=k) == plain
        for _ in range(5):  # on a busy machine short answers may end before a draft arrives
            if read_counters(f"{running.url}/metrics")["vllm:spec_decode_num_accepted_tokens_total"]:
                break
            assert complete_all(running.url, cases, num_speculative_tokens=6) == plain
        assert read_counters(f"{running.url}/metrics")["vllm:spec_decode_num_accepted_tokens_total"] > 0
        coverage = read_counters(running.drafts[0].metrics_url)["outrider_draft_vocabulary_coverage"]
        assert 0.5 < coverage < 1.0
