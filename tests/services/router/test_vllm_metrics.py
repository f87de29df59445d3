"""The router's page answers the queries of vLLM's dashboards and has what a picker of pods asks for."""

from __future__ import annotations

import re

import grpc
import pytest

from tests.vllm_metrics import DASHBOARDS, PICKER
from tests.waiting import WAIT_S, wait_until


def labels_of(page: str, name: str) -> list[dict[str, str]]:
    """The labels of each series of that name."""
    found = re.findall(rf"^{re.escape(name)}\{{(.*)\}} ", page, re.MULTILINE)
    return [dict(re.findall(r'(\w+)="([^"]*)"', labels)) for labels in found]


def value(page: str, name: str, **labels: str) -> float:
    total = 0.0
    for line in page.splitlines():
        if line.startswith(name + "{") and all(f'{key}="{text}"' in line for key, text in labels.items()):
            total += float(line.rpartition(" ")[2])
    return total


@pytest.fixture
def page(router) -> str:
    assert router.complete(prompt=[70, 71], n=2, max_tokens=3).status_code == 200
    return router.client.get("/metrics").text


@pytest.mark.parametrize("name", PICKER)
def test_the_picker_finds_its_families(page, router, name):
    (labels,) = labels_of(page, name)
    assert {"model_name", "engine", *PICKER[name]} <= labels.keys()
    assert labels["model_name"] == router.model


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_finds_its_series(page, router, name):
    series = labels_of(page, name)
    assert series
    assert {labels["model_name"] for labels in series} == {router.model}
    assert {labels["engine"] for labels in series} == {"router"}


def test_the_targets_are_summed(new_target, new_router):
    targets = [new_target(), new_target()]
    for target, used in zip(targets, (10, 30), strict=True):
        target.description.load.num_used_blocks, target.description.load.num_blocks = used, 100
        target.description.block_size = 16
    page = new_router([target.address for target in targets]).client.get("/metrics").text
    assert value(page, "vllm:num_requests_waiting") == 4
    assert value(page, "vllm:kv_cache_usage_perc") == pytest.approx(0.2)
    assert value(page, "vllm:cache_config_info", block_size="16", num_gpu_blocks="200") == 1


def test_choices_that_end_are_counted_by_how(router, target):
    router.complete(prompt=[70], n=2, max_tokens=3)
    target.fail_after, target.failure = 1, (grpc.StatusCode.INTERNAL, "broken")
    assert router.complete(prompt=[70], max_tokens=3).status_code >= 500
    target.fail_after, target.hang_after = None, 1
    with router.client.stream("POST", "/v1/completions", json={"prompt": [70], "stream": True}) as response:
        next(response.iter_raw())
    assert target.cancelled.wait(WAIT_S)

    def ended(reason: str) -> float:
        return value(router.client.get("/metrics").text, "vllm:request_success_total", finished_reason=reason)

    wait_until(lambda: ended("abort") == 1)
    assert [ended(reason) for reason in ("length", "error")] == [2, 1]
    page = router.client.get("/metrics").text
    assert value(page, "vllm:request_generation_tokens_count") == 4
    assert value(page, "vllm:request_params_n_sum") == 4


def test_choices_that_end_with_another_that_failed_are_errors(router, target):
    target.fail_after, target.failing_choice, target.failure = 1, 0, (grpc.StatusCode.INTERNAL, "broken")
    target.hang_after = 2
    assert router.complete(prompt=[70], n=3, max_tokens=9).status_code == 500
    page = router.client.get("/metrics").text
    assert value(page, "vllm:request_success_total", finished_reason="error") == 3
    assert value(page, "vllm:request_success_total", finished_reason="abort") == 0


def test_cached_tokens_are_counted(router, target):
    target.num_cached_tokens = 2
    router.complete(prompt=[[70, 71, 72], [73]], n=2, max_tokens=1)
    page = router.client.get("/metrics").text
    assert value(page, "vllm:prompt_tokens_cached_total") == 3
    assert value(page, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 3
    assert value(page, "vllm:prompt_tokens_by_source_total", source="local_compute") == 1


def test_tokens_expected_in_a_cache_are_counted(new_target, new_router):
    target = new_target()
    target.description.caches_prefixes, target.description.block_size = True, 16
    target.description.load.num_blocks = 100
    router = new_router([target.address])
    for _ in range(2):
        assert router.complete(prompt=[70] * 70, max_tokens=1).status_code == 200
    page = router.client.get("/metrics").text
    assert value(page, "outrider_prompt_tokens_predicted_total") == 64  # one chunk of the second prompt
    assert "outrider_prefix_index_entries 1.0" in page


def test_refused_requests_are_counted_by_the_limit(new_router, target):
    router = new_router([target.address], max_waiting_tokens=8)
    target.hang_after = 1
    with router.client.stream("POST", "/v1/completions", json={"prompt": [70] * 6, "stream": True}) as response:
        pieces = response.iter_raw()  # the reference keeps the stream open
        assert next(pieces)
        assert router.complete(prompt=[70] * 6).status_code == 503
    target.hang_after, target.fail_after = None, 0
    target.failure = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    assert router.complete(prompt=[70]).status_code == 503
    page = router.client.get("/metrics").text
    for reason in ("max_num_queued_tokens", "max_num_queued_reqs"):
        assert value(page, "vllm:admission_rejections_total", reason=reason) == 1


def test_a_request_whose_choices_are_all_refused_is_counted_once(router, target):
    target.fail_after, target.failure = 0, (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    assert router.complete(prompt=[[70], [71], [72]], n=3).status_code == 503
    page = router.client.get("/metrics").text
    assert value(page, "vllm:admission_rejections_total", reason="max_num_queued_reqs") == 1
