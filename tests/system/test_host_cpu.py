"""A draft on cores of its target's host that the target does not use: the same tokens as without speculation."""

from __future__ import annotations

import os

import pytest

from bench.workload import read_counters
from cluster.engine.cpu_kernels import has_kernels
from services.launch.local import LocalCluster
from tests.system.cases import sampled_cases
from tests.system.client import complete_all
from tests.system.conftest import PATIENT, READY_TIMEOUT_SECONDS, cluster_config

CPUS = sorted(os.sched_getaffinity(0))

pytestmark = [
    pytest.mark.skipif(not has_kernels(), reason="PyTorch's operators are refused with numerics invariant"),
    pytest.mark.skipif(len(CPUS) < 2, reason="target and draft have a core each"),
]


def test_the_tokens_are_those_without_speculation() -> None:
    settings = ["draft.placement=host-cpu", f"target.cpus=[{CPUS[0]}]", "target.numerics=invariant"]
    with LocalCluster(cluster_config(PATIENT, *settings)) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        (target,), (draft,) = cluster.targets, cluster.drafts
        assert (os.sched_getaffinity(target.pid), os.sched_getaffinity(draft.pid)) == ({CPUS[0]}, set(draft.cpus))
        assert CPUS[0] not in draft.cpus
        cases = sampled_cases(8)
        plain = complete_all(cluster.url, cases, num_speculative_tokens=0)
        assert complete_all(cluster.url, cases, num_speculative_tokens=4) == plain
        accepted = read_counters(f"{cluster.url}/metrics")["vllm:spec_decode_num_accepted_tokens_total"]
    assert accepted > 0
