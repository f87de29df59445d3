"""Other ways to put vLLM into a cluster, each called by an unmodified client: same tokens as without speculation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from openai import OpenAI

from bench.workload import read_counters
from cluster.config.file import load_config
from services.launch.local import LocalCluster
from tests.soak import length
from tests.system.client import Case, complete_all
from tests.system.vllm.conftest import SETTINGS
from tests.system.vllm.programs import ONE_THREAD, READY_S
from tests.waiting import WAIT_S, eventually

SHORT_OF_BLOCKS = {
    "target.kv_cache_bytes": 4 * 2**20,
    "target.max_model_len": 512,
    "simulation.round_trip_ms": 15,
}
# An engine and its draft worker take 60 CPU seconds, so `make test` runs one configuration: only `make soak` has
# vLLM's own EAGLE, targets of vLLM in bfloat16, and preempted sequences with a draft of the PyTorch engine. With the V2
# runner, `tests/system/ray/test_vllm.py` has two ranks, and `tests/cluster/vllm_plugin/test_device_drafts.py` has draft
# models.
BFLOAT16 = "bfloat16 and a vLLM draft"
VLLM_DRAFT = {"draft.drafter": "vllm", "draft.engine_args": "{enforce_eager: true}"}
CONFIGURATIONS: dict[str, Mapping[str, object]] = {
    "few blocks and a vLLM draft far away": {**SHORT_OF_BLOCKS, **VLLM_DRAFT, "speculation.suffix_bytes": 10**6},
    **length(
        {},
        {
            "vLLM's own EAGLE": {
                "draft.drafter": "engine",
                "draft.model": "outrider-eagle-12m",
                "draft.speculative_config": "{method: eagle}",
                "speculation.num_speculative_tokens": 3,
            },
            "few blocks and a draft pool far away": SHORT_OF_BLOCKS,
            BFLOAT16: {"target.dtype": "bfloat16", **VLLM_DRAFT},
            "two tensor-parallel ranks": {"target.tensor_parallel_size": 2},
            "vLLM's own draft model": {
                "draft.drafter": "engine",
                "draft.speculative_config": "{method: draft_model}",
                "speculation.num_speculative_tokens": 3,
            },
            "vLLM's own n-gram": {
                "draft.drafter": "engine",
                "draft.speculative_config": "{method: ngram, prompt_lookup_max: 3, prompt_lookup_min: 1}",
            },
        },
    ),
}
# Answers that near-ties may change, of 40 in `make soak`: float32 has one rarely, bfloat16 one in a thousand tokens.
MAX_DIFFERENT = {BFLOAT16: 4}
NUM_CASES = length(10, 20)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_same_tokens(name: str, cases: list[Case]) -> None:
    settings = {**SETTINGS, "target.dtype": "float32", "draft.dtype": "float32", "router.port": 0}
    settings |= CONFIGURATIONS[name]
    is_short_of_blocks = name.startswith("few blocks")
    few = [replace(case, max_tokens=160) if is_short_of_blocks else case for case in cases[:NUM_CASES]]
    config = load_config(None, [f"{key}={value}" for key, value in settings.items()])
    with LocalCluster(config, {"target": ONE_THREAD}) as cluster:
        cluster.wait_ready(READY_S)
        plain = complete_all(cluster.url, few, asks_again=True, num_speculative_tokens=0)
        answers = complete_all(cluster.url, few, asks_again=True)
        answers += complete_all(cluster.url, few, asks_again=True, num_speculative_tokens=4)
        num_different = sum(a != b for a, b in zip(answers, plain + plain, strict=True))
        assert num_different <= MAX_DIFFERENT.get(name, 1)
        assert eventually(
            lambda: max(acceptance_histogram(cluster.url), default=0) > 0
        )  # a busy machine's links go down
        counters = read_counters(cluster.targets[0].metrics_url)
        assert (counters["vllm:num_preemptions_total"] > 0) == is_short_of_blocks


def acceptance_histogram(url: str) -> dict[int, int]:
    """Gets an answer through the `openai` client. Returns its rounds by the number of their accepted drafts."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
    model = client.models.list().data[0].id
    more: dict[str, Any] = {"return_speculation_stats": True, "num_speculative_tokens": 3}
    answer = client.completions.create(
        model=model, prompt="def main():\n    return 1\n\ndef main(", max_tokens=64, temperature=0, extra_body=more
    )
    assert answer.choices[0].text
    counts: list[int] = answer.choices[0].model_extra["speculation"]["acceptance_histogram"]
    return {num_accepted: count for num_accepted, count in enumerate(counts) if count}
