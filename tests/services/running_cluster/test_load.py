from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from cluster.diagnosis.measurements import Workload
from protos.speculation.v1 import types_pb2
from services.running_cluster.access import Access
from services.running_cluster.load import LoadMaker
from services.running_cluster.workers import ClusterFacts, WorkerFacts
from tests.http_server import AnsweringServer, HttpAnswer, HttpRequest, answering

SECONDS = 1.5


class Program:
    """Answers as a router, a target and a draft worker in one; two sequences wait at any time."""

    def __init__(self) -> None:
        self.num_steps = 0

    def __call__(self, request: HttpRequest) -> HttpAnswer:
        if request.method == "POST":
            threading.Event().wait(0.05)
            return HttpAnswer("{}")
        # Each time that the page is read there are 50 more decode steps of 20 ms.
        self.num_steps += 50
        steps = f'steps_total{{kind="decode"}} {self.num_steps}\n'
        seconds = f'step_seconds_total{{kind="decode"}} {self.num_steps * 0.02}\n'
        told = f"outrider_{steps}outrider_{seconds}"
        return HttpAnswer(f"vllm:num_requests_waiting 2\nvllm:generation_tokens_total 7\n{told}")


@pytest.fixture
def target() -> Iterator[AnsweringServer]:
    with answering(Program()) as server:
        yield server


@pytest.fixture
def draft() -> Iterator[AnsweringServer]:
    with answering(Program()) as server:
        yield server


def asked(server: AnsweringServer, field: str) -> list[str]:
    """The values of `field` in all requests for answers."""
    return [json.loads(request.body)[field] for request in server.requests if request.method == "POST"]


def worker(pool: str, url: str) -> WorkerFacts:
    machine = types_pb2.Machine(metrics_url=f"{url}/metrics")
    return WorkerFacts(pool, "127.0.0.1:1", types_pb2.ModelDescription(), types_pb2.Load(), machine, 6, 1, 0.0)


def unchanged(facts: ClusterFacts, access: Access) -> None:
    """Its programs speak no gRPC."""


# Three pages before and three after; the target's once in between where the controller chooses k.
@pytest.mark.parametrize(("depth", "most"), [(0, 6), (5, 6), (None, 7)])
def test_pages_are_asked_no_more_than_is_needed(
    depth: int | None, most: int, target: AnsweringServer, draft: AnsweringServer
) -> None:
    targets, drafts = (worker("target", target.url),), (worker("draft", draft.url),)
    maker = LoadMaker(ClusterFacts(target.url, "m", "", targets, drafts), ["x"], 8, check=unchanged)
    workload = Workload(1, 0.0, depth)
    grown = maker.run(workload, SECONDS)
    assert sum(request.path == "/metrics" for request in [*target.requests, *draft.requests]) <= most
    assert maker.measured(workload, grown).counts.mean_waiting == pytest.approx(2.0)


def test_steps_are_counted_by_kind(target: AnsweringServer) -> None:
    facts = ClusterFacts(target.url, "m", "", (worker("target", target.url),), ())
    maker = LoadMaker(facts, ["x"], 8, check=unchanged)
    workload = Workload(1, 0.0, 0)
    counts = maker.measured(workload, maker.run(workload, 0.5)).counts
    assert counts.decode.count >= 50
    assert counts.decode.mean_seconds == pytest.approx(0.02)
    assert counts.verify.count == counts.prefill.count == 0


def test_each_part_begins_with_prompts_of_its_own(target: AnsweringServer) -> None:
    targets = (worker("target", target.url),)
    maker = LoadMaker(ClusterFacts(target.url, "m", "", targets, ()), ["a", "b", "c", "d"], 8, check=unchanged)
    prompts, salts = [], []
    for part in range(2):
        target.requests.clear()
        maker.run(Workload(1, 0.0, 5), 0.5, part=part, num_parts=2)
        prompts.append(asked(target, "prompt")[:3])
        salts += asked(target, "cache_salt")
    assert prompts == [["a", "b", "c"], ["c", "d", "a"]]
    assert len(set(salts)) == len(salts)  # no load finds what another has left in the prefix cache
