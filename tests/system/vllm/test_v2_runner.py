"""A target on vLLM's V2 runner, scheduled asynchronously, answers as our own engine does: in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from bench.workload import read_counters
from cluster.config.file import load_config
from services.launch.local import LocalCluster
from tests.cluster.vllm_plugin.environment import environment
from tests.soak import length, only_in_soak
from tests.system.shaped_cases import Body, answer, assert_alike, one_of_each_constraint, shaped_bodies

MAX_TOKENS = 16  # a token takes the interpreter a tenth of a second
SETTINGS = (
    "router.port=0",
    "target.engine=vllm",
    "target.dtype=float32",
    "target.device=cpu",
    "target.engine_args={enforce_eager: true}",
    "target.max_num_seqs=8",
    "target.max_model_len=256",
    "target.max_num_batched_tokens=256",
    "target.kv_cache_bytes=67108864",
    "target.memory_utilization=0.05",
    "draft.dtype=float32",
    "draft.device=cpu",
    "speculation.draft_timeout_ms=5000",
)
BODIES: dict[str, Body] = {
    name: {**body, "max_tokens": MAX_TOKENS, "n": 1}
    for name, body in length(one_of_each_constraint(), dict(shaped_bodies())).items()
}


@pytest.fixture(scope="module")
def on_v2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment(tmp_path_factory.mktemp("plugin")).items():
            patched.setenv(name, value)
        with LocalCluster(load_config(None, SETTINGS)) as running:
            running.wait_ready(300)
            yield running


@only_in_soak
@pytest.mark.parametrize("k", [0, 4])
def test_it_answers_as_our_own_engine(cluster: LocalCluster, on_v2: LocalCluster, k: int) -> None:
    before = read_counters(f"{on_v2.url}/metrics")
    with (
        httpx.Client(base_url=cluster.url, timeout=300) as other,
        httpx.Client(base_url=on_v2.url, timeout=300) as client,
    ):
        for name, body in BODIES.items():
            try:
                assert_alike(answer(other, body), answer(client, {**body, "num_speculative_tokens": k}))
            except AssertionError as error:
                raise AssertionError(name) from error
    grown = {name: value - before.get(name, 0.0) for name, value in read_counters(f"{on_v2.url}/metrics").items()}
    assert (grown["vllm:spec_decode_num_accepted_tokens_total"] > 0) == (k > 0)
