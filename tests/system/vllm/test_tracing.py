"""A trace of a request that vLLM runs: its scheduler, in another process, says when a request leaves the queue."""

from __future__ import annotations

import httpx

from tests.collector import Collector
from tests.system.test_tracing import check_one_choice, new_trace
from tests.system.vllm.programs import Programs
from tests.waiting import WAIT_S


def test_a_whole_answer(programs: Programs, collector: Collector) -> None:
    programs.use("right")
    trace_id, headers = new_trace()
    body = {"prompt": "def main(", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "num_speculative_tokens": 4}
    response = httpx.post(f"{programs.url}/v1/completions", json=body, headers=headers, timeout=WAIT_S)
    assert response.status_code == 200, response.text
    check_one_choice(collector.wait_for(trace_id, 6), "/v1/completions", 60)
