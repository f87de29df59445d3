"""Traces of whole clusters, as a collector gets them: one trace for a request, from its client to every target."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from bench.workload import read_counters
from cluster.config.file import load_config
from services.launch.local import LocalCluster, WorkerProcess, free_ports
from tests.collector import Collector, ReceivedSpan, collecting
from tests.system.conftest import PATIENT, READY_TIMEOUT_SECONDS, cluster_config
from tests.waiting import WAIT_S, eventually

CALLER = "00f067aa0ba902b7"
CALL = "speculation.v1.Target/GenerateMany"
SIMULATED = (
    "target.engine=simulated",
    "draft.drafter=simulated",
    "simulation.target_step_ms=[[1, 5]]",
    "simulation.draft_step_ms=[[1, 0.5]]",
    "simulation.acceptance=0.8",
    "speculation.controller=fixed",
    PATIENT,
    "router.port=0",
)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "100"  # ms; 5 s by default
        yield collector
        del os.environ["OTEL_BSP_SCHEDULE_DELAY"]


@pytest.fixture(scope="module")
def simulated(collector: Collector) -> Iterator[LocalCluster]:
    with LocalCluster(load_config(None, [*SIMULATED, f"tracing.endpoint={collector.url}"])) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        yield cluster


def new_trace() -> tuple[str, dict[str, str]]:
    """The ID of a trace that nobody else has, and the headers of a request that belongs to it."""
    trace_id = os.urandom(16).hex()
    return trace_id, {"traceparent": f"00-{trace_id}-{CALLER}-01", "tracestate": "vendor=1"}


def one(spans: Sequence[ReceivedSpan], name: str, kind: str = "internal") -> ReceivedSpan:
    (span,) = [span for span in spans if (span.name, span.kind) == (name, kind)]
    return span


def assert_within(inner: ReceivedSpan, outer: ReceivedSpan) -> None:
    assert inner.parent_id == outer.id
    assert outer.start <= inner.start <= inner.end <= outer.end


def check_one_choice(spans: Sequence[ReceivedSpan], path: str, num_tokens: int) -> None:
    """Checks the spans of a request with one choice that finished on one target, with drafts."""
    assert len(spans) == 6
    request = one(spans, f"POST {path}", "server")
    call, served = one(spans, CALL, "client"), one(spans, CALL, "server")
    queue, prefill, decode = (one(spans, name) for name in ("queue", "prefill", "decode"))
    assert request.parent_id == CALLER
    assert [span.service for span in (request, call, served)] == ["outrider-router"] * 2 + ["outrider-target"]
    assert_within(call, request)
    assert_within(served, call)
    for part in (queue, prefill, decode):
        assert_within(part, served)
    assert queue.end == prefill.start
    assert prefill.end == decode.start
    assert decode.end == served.end
    assert prefill.start < prefill.end < decode.end
    assert not any(span.has_failed for span in spans)
    assert {span.tracestate for span in spans} == {"vendor=1"}

    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["http.route"] == path
    assert request.attributes["outrider.request_id"] == served.attributes["outrider.request_id"]
    for span in (request, served, decode):
        assert span.attributes["gen_ai.usage.output_tokens"] == num_tokens
    assert request.attributes["gen_ai.usage.input_tokens"] == served.attributes["gen_ai.usage.input_tokens"] > 0
    for span in (request, call, served):
        assert span.attributes["gen_ai.response.finish_reasons"] == ["length"]
    seconds = request.attributes["gen_ai.latency.time_to_first_token"]
    assert 0 < served.attributes["gen_ai.latency.time_to_first_token"] <= seconds
    assert seconds <= request.attributes["gen_ai.latency.e2e"] <= (request.end - request.start) / 1e9

    rounds, drafted = decode.attributes["outrider.num_rounds"], decode.attributes["outrider.num_draft_tokens"]
    accepted = decode.attributes["outrider.num_accepted_tokens"]
    assert 0 < accepted <= drafted
    assert rounds + accepted + 1 == num_tokens  # one of each round is the target's own, and the first is the prefill's
    assert decode.attributes["outrider.mean_k"] == drafted / rounds
    assert decode.attributes["outrider.draft_acceptance_rate"] == accepted / drafted


def test_a_whole_answer(simulated: LocalCluster, collector: Collector) -> None:
    trace_id, headers = new_trace()
    body = {"prompt": "a b c", "max_tokens": 100, "seed": 7, "temperature": 0.5}
    response = httpx.post(f"{simulated.url}/v1/completions", json=body, headers=headers, timeout=WAIT_S)
    spans = collector.wait_for(trace_id, 6)
    check_one_choice(spans, "/v1/completions", 100)
    attributes = one(spans, "POST /v1/completions", "server").attributes
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "simulated"
    assert attributes["gen_ai.request.max_tokens"] == 100
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.request.seed"] == 7
    assert attributes["gen_ai.request.stream"] is False
    assert attributes["gen_ai.response.id"] == response.json()["id"]
    assert attributes["http.response.header.x-request-id"] == [response.headers["x-request-id"]]


def test_a_streamed_answer(simulated: LocalCluster, collector: Collector) -> None:
    trace_id, headers = new_trace()
    body = {"prompt": "a b c", "max_tokens": 100, "stream": True, "seed": 7}
    httpx.post(f"{simulated.url}/v1/completions", json=body, headers=headers, timeout=WAIT_S)
    spans = collector.wait_for(trace_id, 6)
    check_one_choice(spans, "/v1/completions", 100)
    assert one(spans, "POST /v1/completions", "server").attributes["gen_ai.request.stream"] is True


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 100, "seed": 7}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 100, "seed": 7}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 100, "seed": 7}),
    ],
)
def test_each_api_of_chats_has_spans(
    simulated: LocalCluster, collector: Collector, path: str, fields: dict[str, Any]
) -> None:
    trace_id, headers = new_trace()
    assert httpx.post(f"{simulated.url}{path}", json=fields, headers=headers, timeout=WAIT_S).status_code == 200
    spans = collector.wait_for(trace_id, 6)
    check_one_choice(spans, path, 100)
    assert one(spans, f"POST {path}", "server").attributes["gen_ai.operation.name"] == "chat"


def test_each_choice_has_a_call_of_its_own(simulated: LocalCluster, collector: Collector) -> None:
    trace_id, headers = new_trace()
    body = {"prompt": "a b c", "max_tokens": 10, "n": 3}
    httpx.post(f"{simulated.url}/v1/completions", json=body, headers=headers, timeout=WAIT_S)
    spans = collector.wait_for(trace_id, 1 + 3 * 5)
    request = one(spans, "POST /v1/completions", "server")
    calls = [span for span in spans if span.kind == "client"]
    assert sorted(call.attributes["outrider.choice_index"] for call in calls) == [0, 1, 2]
    for call in calls:
        assert_within(call, request)
    assert request.attributes["gen_ai.usage.output_tokens"] == 30
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"] * 3


def test_what_is_refused_has_one_span(simulated: LocalCluster, collector: Collector) -> None:
    trace_id, headers = new_trace()
    httpx.post(f"{simulated.url}/v1/completions", json={"prompt": "a", "n": 0}, headers=headers)
    (request,) = collector.wait_for(trace_id, 1)
    assert request.attributes["http.response.status_code"] == 400
    assert not request.has_failed  # it is the client that has


def test_a_client_that_leaves(simulated: LocalCluster, collector: Collector) -> None:
    trace_id, headers = new_trace()
    body = {"prompt": "a b c", "max_tokens": 2000, "stream": True}
    with httpx.stream("POST", f"{simulated.url}/v1/completions", json=body, headers=headers) as reply:
        lines = reply.iter_lines()  # which ends the stream when it is thrown away
        next(lines)
    spans = collector.wait_for(trace_id, 6)
    check_left(spans)
    assert one(spans, "decode").end == one(spans, CALL, "server").end


def test_a_client_that_leaves_before_its_answer(simulated: LocalCluster, collector: Collector) -> None:
    trace_id, headers = new_trace()
    body = {"prompt": "a b c", "max_tokens": 2000, "num_speculative_tokens": 0}  # takes 10 s
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{simulated.url}/v1/completions", json=body, headers=headers, timeout=3.0)
    check_left(collector.wait_for(trace_id, 6))


def check_left(spans: Sequence[ReceivedSpan]) -> None:
    request = one(spans, "POST /v1/completions", "server")
    assert (request.has_failed, request.attributes["error.type"]) == (True, "499")
    assert request.attributes["outrider.outcome"] == 499
    for kind in ("client", "server"):
        assert one(spans, CALL, kind).attributes["gen_ai.response.finish_reasons"] == ["abort"]


def test_what_the_client_does_not_sample_is_not_recorded(simulated: LocalCluster, collector: Collector) -> None:
    trace_id, headers = new_trace()
    unsampled = {"traceparent": headers["traceparent"].removesuffix("01") + "00"}
    body = {"prompt": "a b c", "max_tokens": 5}
    httpx.post(f"{simulated.url}/v1/completions", json=body, headers=unsampled, timeout=WAIT_S)
    later, headers = new_trace()
    httpx.post(f"{simulated.url}/v1/completions", json=body, headers=headers, timeout=WAIT_S)
    collector.wait_for(later, 6)
    assert collector.spans_of(trace_id) == []


def test_a_request_without_a_trace_begins_one(simulated: LocalCluster, collector: Collector) -> None:
    response = httpx.post(f"{simulated.url}/v1/completions", json={"prompt": "a b c", "max_tokens": 5}, timeout=WAIT_S)
    request_id = response.json()["id"]

    def trace_ids() -> set[str]:
        return {
            span.trace_id for span in list(collector.spans) if span.attributes.get("outrider.request_id") == request_id
        }

    assert eventually(lambda: len(trace_ids()) == 1)
    spans = collector.wait_for(trace_ids().pop(), 6)
    assert one(spans, "POST /v1/completions", "server").parent_id == ""


def test_the_torch_engine(collector: Collector) -> None:
    settings = ("draft.replicas=1", "speculation.controller=fixed", PATIENT, f"tracing.endpoint={collector.url}")
    with LocalCluster(cluster_config(*settings)) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        trace_id, headers = new_trace()
        messages = [{"role": "user", "content": "def main("}]
        body = {"messages": messages, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        httpx.post(f"{cluster.url}/v1/chat/completions", json=body, headers=headers, timeout=WAIT_S)
        spans = collector.wait_for(trace_id, 6)
    check_one_choice(spans, "/v1/chat/completions", 60)
    request = one(spans, "POST /v1/chat/completions", "server")
    assert request.attributes["gen_ai.operation.name"] == "chat"


def is_idle(target: WorkerProcess) -> bool:
    return read_counters(target.metrics_url)["vllm:num_requests_running"] == 0


def test_a_request_that_is_moved_and_then_fails(collector: Collector) -> None:
    settings = ("target.replicas=2", "draft.replicas=1", "target.drain_seconds=0.2", "router.max_pause_seconds=0.2")
    with LocalCluster(load_config(None, [*SIMULATED, *settings, f"tracing.endpoint={collector.url}"])) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        trace_id, headers = new_trace()
        body = {"prompt": "a b c", "max_tokens": 2000, "stream": True}
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=WAIT_S) as reply:
            lines = reply.iter_lines()
            next(lines)
            serving, other = sorted(cluster.targets, key=is_idle)
            os.kill(serving.pid, signal.SIGTERM)
            while is_idle(other):
                next(lines)
            os.kill(other.pid, signal.SIGTERM)
            rest = "".join(lines)
        assert '"error"' in rest
        spans = collector.wait_for(trace_id, 1 + 2 * 5)
    request = one(spans, "POST /v1/completions", "server")
    assert request.attributes["http.response.status_code"] == 200  # as it had begun
    assert (request.has_failed, request.attributes["outrider.outcome"]) == (True, 503)
    calls = [span for span in spans if span.kind == "client"]
    served = [span for span in spans if span.kind == "server" and span.name == CALL]
    assert len(calls) == len(served) == 2
    assert len({call.attributes["server.address"] for call in calls}) == 2
    assert len({span.resource["service.instance.id"] for span in served}) == 2
    assert [span.parent_id for span in served] == [call.id for call in calls]
    assert {call.parent_id for call in calls} == {request.id}
    assert [call.attributes.get("error.type") for call in calls] == ["draining", "draining"]
    assert [span.attributes.get("error.type") for span in served] == ["unavailable_error"] * 2
    first, second = calls
    assert first.end <= second.start
    assert second.attributes["outrider.num_earlier_tokens"] > first.attributes["outrider.num_earlier_tokens"] == 0
    for span in served:
        parts = [part.name for part in spans if part.parent_id == span.id]
        assert parts == ["queue", "prefill", "decode"]


def test_a_collector_that_is_away_disturbs_nobody() -> None:
    (port,) = free_ports(1)
    with LocalCluster(load_config(None, [*SIMULATED, f"tracing.endpoint=http://127.0.0.1:{port}"])) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        body = {"prompt": "a b c", "max_tokens": 20, "seed": 3}
        answers = [httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=WAIT_S) for _ in range(20)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1


ROUTER = """
import sys
from cluster.config.file import load_config
from services.router.app import create_app
create_app(load_config(None, sys.argv[1:]))
print(*sorted(name for name in sys.modules if name.split(".")[0] == "opentelemetry"))
"""


@pytest.mark.parametrize("is_on", [False, True])
def test_nothing_is_imported_where_it_is_off(is_on: bool) -> None:
    settings = ["target.addresses=['127.0.0.1:7000']", *(["tracing.endpoint=http://127.0.0.1:9"] if is_on else [])]
    made = subprocess.run([sys.executable, "-c", ROUTER, *settings], capture_output=True, text=True, check=True)
    assert bool(made.stdout.strip()) is is_on
