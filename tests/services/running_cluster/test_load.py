from __future__ import annotations

import http.server
import json
import threading
from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

import pytest

from cluster.diagnosis.measurements import Workload
from protos.speculation.v1 import types_pb2
from services.running_cluster.access import Access
from services.running_cluster.load import LoadMaker
from services.running_cluster.workers import ClusterFacts, WorkerFacts

SECONDS = 1.5


class Program(http.server.BaseHTTPRequestHandler):
    """A router, a target and a draft worker in one, who counts what it is asked; two sequences wait, always."""

    asked: ClassVar[Counter[str]] = Counter()
    num_steps = 0
    prompts: ClassVar[list[str]] = []
    salts: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked[self.path] += 1
        # Each time that the page is read there are 50 more decode steps of 20 ms.
        Program.num_steps += 50
        steps = f'steps_total{{kind="decode"}} {Program.num_steps}\n'
        seconds = f'step_seconds_total{{kind="decode"}} {Program.num_steps * 0.02}\n'
        told = f"outrider_{steps}outrider_{seconds}"
        self.answer(f"vllm:num_requests_waiting 2\nvllm:generation_tokens_total 7\n{told}".encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.prompts.append(body["prompt"])
        self.salts.append(body["cache_salt"])
        threading.Event().wait(0.05)
        self.answer(b"{}")

    def answer(self, content: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def pages() -> Iterator[dict[str, str]]:
    """The pages' addresses, by program."""
    Program.asked.clear()
    Program.prompts.clear()
    Program.salts.clear()
    servers = {name: http.server.ThreadingHTTPServer(("127.0.0.1", 0), Program) for name in ("target", "draft")}
    for server in servers.values():
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {name: f"http://127.0.0.1:{server.server_port}" for name, server in servers.items()}
    for server in servers.values():
        server.shutdown()


def worker(pool: str, url: str) -> WorkerFacts:
    machine = types_pb2.Machine(metrics_url=f"{url}/metrics")
    return WorkerFacts(pool, "127.0.0.1:1", types_pb2.ModelDescription(), types_pb2.Load(), machine, 6, 1, 0.0)


def unchanged(facts: ClusterFacts, access: Access) -> None:
    """Its programs speak no gRPC."""


# Three pages before and three after; the target's once in between where the controller chooses k.
@pytest.mark.parametrize(("depth", "most"), [(0, 6), (5, 6), (None, 7)])
def test_pages_are_asked_no_more_than_is_needed(depth: int | None, most: int, pages: dict[str, str]) -> None:
    targets, drafts = (worker("target", pages["target"]),), (worker("draft", pages["draft"]),)
    maker = LoadMaker(ClusterFacts(pages["target"], "m", "", targets, drafts), ["x"], 8, check=unchanged)
    workload = Workload(1, 0.0, depth)
    grown = maker.run(workload, SECONDS)
    assert Program.asked["/metrics"] <= most
    assert maker.measured(workload, grown).counts.mean_waiting == pytest.approx(2.0)


def test_steps_are_counted_by_kind(pages: dict[str, str]) -> None:
    facts = ClusterFacts(pages["target"], "m", "", (worker("target", pages["target"]),), ())
    maker = LoadMaker(facts, ["x"], 8, check=unchanged)
    workload = Workload(1, 0.0, 0)
    counts = maker.measured(workload, maker.run(workload, 0.5)).counts
    assert counts.decode.count >= 50
    assert counts.decode.mean_seconds == pytest.approx(0.02)
    assert counts.verify.count == counts.prefill.count == 0


def test_each_part_begins_with_prompts_of_its_own(pages: dict[str, str]) -> None:
    targets = (worker("target", pages["target"]),)
    maker = LoadMaker(ClusterFacts(pages["target"], "m", "", targets, ()), ["a", "b", "c", "d"], 8, check=unchanged)
    asked = []
    for part in range(2):
        Program.prompts.clear()
        maker.run(Workload(1, 0.0, 5), 0.5, part=part, num_parts=2)
        asked.append(Program.prompts[:3])
    assert asked == [["a", "b", "c"], ["c", "d", "a"]]
    assert len(set(Program.salts)) == len(Program.salts)  # no load finds what another has left in the prefix cache
