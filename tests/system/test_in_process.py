"""Drafts in the target's process: the same tokens over HTTP as without speculation, and one program less."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from bench.workload import read_counters
from cluster.engine.cpu_kernels import has_kernels
from services.launch.local import LocalCluster
from tests.system.cases import sampled_cases
from tests.system.client import complete_all
from tests.system.conftest import PATIENT, READY_TIMEOUT_SECONDS, cluster_config

pytestmark = pytest.mark.skipif(not has_kernels(), reason="PyTorch's operators are refused with numerics invariant")


DRAFTERS = {
    "shared": ("draft.placement=in-process", "draft.in_process_threads=shared"),
    "own": ("draft.placement=in-process", "draft.in_process_threads=own"),
    "eagle": ("draft.placement=in-process", "draft.drafter=eagle", "draft.model=outrider-eagle-12m"),
}


@pytest.fixture(scope="module", params=DRAFTERS)
def in_process(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with LocalCluster(cluster_config(PATIENT, *DRAFTERS[request.param], "target.numerics=invariant")) as running:
        running.wait_ready(READY_TIMEOUT_SECONDS)
        yield running


def test_the_tokens_are_those_without_speculation(in_process: LocalCluster) -> None:
    cases = sampled_cases(16)
    plain = complete_all(in_process.url, cases, num_speculative_tokens=0)
    for k in (1, 4, 8):
        assert complete_all(in_process.url, cases, num_speculative_tokens=k) == plain
    counted = read_counters(in_process.targets[0].metrics_url)
    assert counted["outrider_draft_steps_total"] > 0
    accepted = read_counters(f"{in_process.url}/metrics")["vllm:spec_decode_num_accepted_tokens_total"]
    assert accepted > 0


def test_the_router_sees_a_link_that_is_up(in_process: LocalCluster) -> None:
    assert in_process.drafts == []
    with httpx.Client(base_url=in_process.url) as client:
        (target,) = client.get("/health").json()["targets"]
    assert (target["num_draft_links"], target["num_draft_links_configured"]) == (1, 1)
