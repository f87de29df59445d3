from __future__ import annotations

import httpx
import pytest
from prometheus_client import generate_latest

from cluster.targets.request_times import RequestTimes
from cluster.telemetry.metrics import Reading, WorkerMetrics
from cluster.telemetry.metrics_page import serve_metrics
from services.router.metrics import RouterMetrics


def page_of(metrics: RouterMetrics) -> dict[str, float]:
    return values_of(metrics.render())


def values_of(page: bytes) -> dict[str, float]:
    lines = [line for line in page.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_chunks_and_rounds_are_on_the_page():
    metrics = RouterMetrics("m")
    for num_tokens, seconds in ((3, None), (1, 0.01), (2, 0.011), (1, 1000.0)):
        metrics.tokens.count_tokens(num_tokens, seconds)
    metrics.tokens.count_round(4, 1)
    metrics.tokens.count_round(4, 0)
    metrics.tokens.count_round(4, 3)
    page = page_of(metrics)
    assert page['vllm:generation_tokens_total{engine="router",model_name="m"}'] == 7
    bucket = 'vllm:inter_token_latency_seconds_bucket{{engine="router",le="{}",model_name="m"}}'.format
    assert [page[bucket(limit)] for limit in ("0.01", "0.025", "80.0", "+Inf")] == [1, 2, 2, 3]
    assert page['vllm:inter_token_latency_seconds_count{engine="router",model_name="m"}'] == 3
    assert page['vllm:inter_token_latency_seconds_sum{engine="router",model_name="m"}'] == 0.01 + 0.011 + 1000.0
    assert page['vllm:spec_decode_num_drafts_total{engine="router",model_name="m"}'] == 3
    assert page['vllm:spec_decode_num_draft_tokens_total{engine="router",model_name="m"}'] == 12
    assert page['vllm:spec_decode_num_accepted_tokens_total{engine="router",model_name="m"}'] == 4
    position = (
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="router",model_name="m",position="{}"}}'.format
    )
    assert [page[position(place)] for place in range(3)] == [2, 1, 1]


def test_decoding_is_timed_per_token_and_by_whether_it_may_speculate() -> None:
    metrics = RouterMetrics("m")
    metrics.count_decode(10, 0.2, may_speculate=True)
    metrics.count_decode(10, 0.4, may_speculate=False)
    metrics.count_decode(0, 0.0, may_speculate=False)  # of one token: nothing was decoded after it
    page = page_of(metrics)
    name = "vllm:request_time_per_output_token_seconds"
    assert page[f'{name}_count{{engine="router",model_name="m"}}'] == 2
    assert page[f'{name}_sum{{engine="router",model_name="m"}}'] == pytest.approx(0.06)
    for kind, seconds in (("on", 0.2), ("off", 0.4)):
        assert page[f'outrider_decode_tokens_total{{model_name="m",speculation="{kind}"}}'] == 10
        assert page[f'outrider_decode_seconds_total{{model_name="m",speculation="{kind}"}}'] == seconds


def test_a_target_measures_its_requests_as_vllm_does() -> None:
    now = 10.0
    times = RequestTimes(lambda: now)
    for request_id, queued, num_tokens in (("a", 0.25, 700), ("b", 3.0, 0), ("aborted", 0.25, 5)):
        times.admitted(request_id, queued, num_tokens)
    times.admitted("a", 9.0, 1)  # after a preemption
    times.stepped(705)
    for request_id, seconds in (("a", 0.5), ("b", 1.5), ("a", 1.0)):
        now += seconds
        times.committed(request_id)
    for request_id in ("a", "aborted", "never admitted"):
        times.ended(request_id, num_preemptions=int(request_id == "a"))
    page = values_of(generate_latest(WorkerMetrics(times.readings, "m").registry))
    labels = '{engine="0",model_name="m"}'
    for name, count, total in (
        ("queue_time_seconds", 3, 3.5),
        ("prefill_time_seconds", 2, 0.5 + 2.0),
        ("decode_time_seconds", 1, 2.5),
        ("inference_time_seconds", 1, 3.0),
        ("prefill_kv_computed_tokens", 3, 705),
        ("num_preemptions", 2, 1),
    ):
        found = page[f"vllm:request_{name}_count{labels}"], page[f"vllm:request_{name}_sum{labels}"]
        assert found == (count, total), name
    assert page[f"vllm:iteration_tokens_total_sum{labels}"] == 705
    for limit, count in (("0.3", 2), ("2.5", 2), ("+Inf", 3)):
        assert page[f'vllm:request_queue_time_seconds_bucket{{engine="0",le="{limit}",model_name="m"}}'] == count


def test_no_series_says_when_it_began() -> None:
    assert "_created" not in RouterMetrics("m").render().decode()


def test_a_prometheus_that_asks_for_openmetrics_gets_vllms_names() -> None:
    metrics = WorkerMetrics(lambda: [Reading("vllm:num_requests_waiting", "Sequences that wait.", 3)], "m")
    port = serve_metrics(metrics.registry, "127.0.0.1", 0)
    for accept in ("*/*", "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"):
        page = httpx.get(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
        assert 'vllm:num_requests_waiting{engine="0",model_name="m"} 3.0' in page.text.splitlines()
        assert page.headers["content-type"].startswith("text/plain")
