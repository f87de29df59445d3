"""A trace of a request that vLLM runs: its scheduler, in another process, says when a request leaves the queue."""

from __future__ import annotations

import httpx

from cluster.config.file import load_config
from services.launch.local import LocalCluster
from tests.collector import collecting
from tests.system.test_tracing import check_one_choice, new_trace
from tests.system.vllm.conftest import SETTINGS
from tests.system.vllm.programs import READY_S


def test_a_whole_answer() -> None:
    settings = {**SETTINGS, "target.dtype": "float32", "draft.dtype": "float32", "router.port": 0}
    settings |= {"speculation.controller": "fixed"}
    with collecting() as collector:
        settings["tracing.endpoint"] = collector.url
        with LocalCluster(load_config(None, [f"{key}={value}" for key, value in settings.items()])) as cluster:
            cluster.wait_ready(READY_S)
            trace_id, headers = new_trace()
            body = {"prompt": "def main(", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
            httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60)
            spans = collector.wait_for(trace_id, 6)
    check_one_choice(spans, "/v1/completions", 60)
