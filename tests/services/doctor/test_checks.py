from __future__ import annotations

from cluster.diagnosis.findings import THREADS_OVERSUBSCRIBED, Finding
from protos.speculation.v1 import types_pb2
from services.doctor.checks import with_programs
from services.running_cluster.workers import ClusterFacts, WorkerFacts

SLOW = Finding("low acceptance", "of some kind", "another draft", 100.0, 0.4)
CROWDED = Finding(THREADS_OVERSUBSCRIBED, "a step took 20 ms", "set target.threads to null", 100.0, 0.2)


def worker(pool: str, port: int, num_threads: int) -> WorkerFacts:
    machine = types_pb2.Machine(cpus=[0, 1], num_threads=num_threads)
    model, load = types_pb2.ModelDescription(), types_pb2.Load()
    return WorkerFacts(pool, f"127.0.0.1:{port}", model, load, machine, 6, 1, 0.0)


def facts(*num_threads: int, of_draft: int = 1) -> ClusterFacts:
    targets = tuple(worker("target", port, number) for port, number in enumerate(num_threads))
    return ClusterFacts("http://127.0.0.1:8000", "m", "", targets, (worker("draft", 9, of_draft),))


def test_threads_whose_cost_is_known_are_told_once_and_where() -> None:
    found = with_programs([SLOW, CROWDED], facts(2, 8))
    assert [finding.name for finding in found] == [SLOW.name, CROWDED.name]
    assert found[1].what == "a step took 20 ms; target 127.0.0.1:1 computes with 8 threads on 2 cores"
    assert found[1].loss == CROWDED.loss


def test_those_of_a_draft_are_told_beside() -> None:
    found = with_programs([CROWDED], facts(8, of_draft=4))
    assert [finding.what.partition(" computes")[0] for finding in found[1:]] == ["draft 127.0.0.1:9"]


def test_without_a_known_cost_all_are_told() -> None:
    found = with_programs([SLOW], facts(2, 8, of_draft=4))
    assert [finding.name for finding in found] == [SLOW.name, "more threads than cores", "more threads than cores"]
    assert [finding.remedy for finding in found[1:]] == ["set target.threads to null", "set draft.threads to null"]
