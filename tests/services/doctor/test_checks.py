from __future__ import annotations

from dataclasses import replace

from cluster.diagnosis.findings import Finding
from protos.speculation.v1 import types_pb2
from services.doctor.checks import with_programs
from services.running_cluster.workers import ClusterFacts, WorkerFacts

SLOW = Finding("low acceptance", "of some kind", "another draft", 100.0, 0.4)


def worker(pool: str, port: int, num_threads: int) -> WorkerFacts:
    machine = types_pb2.Machine(cpus=[0, 1], num_threads=num_threads)
    model, load = types_pb2.ModelDescription(), types_pb2.Load()
    return WorkerFacts(pool, f"127.0.0.1:{port}", model, load, machine, 6, 1, 0.0)


def facts(*num_threads: int, of_draft: int = 1) -> ClusterFacts:
    targets = tuple(worker("target", port, number) for port, number in enumerate(num_threads))
    return ClusterFacts("http://127.0.0.1:8000", "m", "", targets, (worker("draft", 9, of_draft),))


def test_what_programs_describe_comes_after_what_has_a_cost() -> None:
    unreachable = replace(facts(2), unreachable=("target 127.0.0.1:7: no answer",))
    found = with_programs([SLOW], unreachable)
    assert [(finding.name, finding.loss) for finding in found] == [(SLOW.name, SLOW.loss), ("worker unreachable", None)]


def test_of_a_healthy_cluster_nothing_is_added() -> None:
    assert with_programs([SLOW], facts(2, 2)) == [SLOW]
