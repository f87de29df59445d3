"""The bundled draft is worth its while: it proposes the target's choice most of the time, on held-out text."""

from __future__ import annotations

import pytest

from bench.workload import held_out_prompts, read_counters
from services.launch.local import LocalCluster
from tests.system.client import Case, complete_all

LEAST_ACCEPTANCE = 0.70


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_most_drafts_are_accepted(cluster: LocalCluster, temperature: float) -> None:
    fields = {"temperature": temperature, "ignore_eos": True}
    cases = [Case(tuple(prompt), seed, 64, fields) for seed, prompt in enumerate(held_out_prompts(32, seed=1))]
    before = read_counters(f"{cluster.url}/metrics")
    # With one draft a round, every draft follows a correct prefix: the rate is acceptance, not survival.
    complete_all(cluster.url, cases, num_speculative_tokens=1)
    after = read_counters(f"{cluster.url}/metrics")

    def grown(name: str) -> float:
        return after[f"vllm:spec_decode_{name}_total"] - before[f"vllm:spec_decode_{name}_total"]

    assert grown("num_draft_tokens") > 32 * 64 / 4
    assert grown("num_accepted_tokens") >= LEAST_ACCEPTANCE * grown("num_draft_tokens")
