from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from cluster.diagnosis.measurements import WorkerThreads, Workload
from services.doctor.examine import ExaminationPlan, examine
from services.running_cluster.load import LoadMaker, Numbers
from tests.services.doctor.test_checks import facts


@dataclass(slots=True)
class RecordingMaker(LoadMaker):
    """Keeps what it is asked for, and does none of it."""

    asked: list[tuple[Workload, float, int, int]] = field(default_factory=list)

    def run(self, workload: Workload, seconds: float, *, part: int = 0, num_parts: int = 1) -> Numbers:
        self.asked.append((workload, seconds, part, num_parts))
        return defaultdict(float, {"seconds": seconds, "decode": 1.0, "decode seconds": 0.02, "tokens": 4.0})


def test_each_repeat_puts_the_cluster_under_all_loads_with_prompts_of_its_own() -> None:
    maker = RecordingMaker(facts(2), ["x"], 8)
    plan = ExaminationPlan(num_streams=4, temperatures=(0.0, 0.7), max_depth=16, seconds=3.0, repeats=2)
    found = examine(maker, plan)
    loads = plan.runs
    assert [workload for workload, *_ in maker.asked] == [*loads, *loads]
    assert [asked[2:] for asked in maker.asked] == [(0, 2)] * len(loads) + [(1, 2)] * len(loads)
    assert found.plain.counts.num_tokens == 8.0  # of both
    assert [one.workload.num_speculative_tokens for one in found.fixed] == [2, 5, 10]


def test_threads_and_cores_are_those_that_each_worker_describes() -> None:
    plan = ExaminationPlan(num_streams=4, temperatures=(0.0,), max_depth=16, seconds=3.0, repeats=1)
    found = examine(RecordingMaker(facts(8, of_draft=3), ["x"], 8), plan)
    assert found.threads == [
        WorkerThreads("target", "target 127.0.0.1:0", 8, 2),
        WorkerThreads("draft", "draft 127.0.0.1:9", 3, 2),
    ]


def test_the_controllers_runs_are_three_and_apart() -> None:
    plan = ExaminationPlan(num_streams=4, temperatures=(0.0,), max_depth=16, seconds=3.0, repeats=1)
    auto = [place for place, load in enumerate(plan.runs) if load.num_speculative_tokens is None]
    assert len(auto) == 3
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(auto))


def test_each_load_is_logged_with_the_time_that_is_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plan = ExaminationPlan(num_streams=4, temperatures=(0.0, 0.7), max_depth=16, seconds=3.0, repeats=2)
    examine(RecordingMaker(facts(2), ["x"], 8), plan)
    assert caplog.messages[0] == "load 1 of 18: 4 streams, k = 0, temperature 0; about 72 s left"
    assert caplog.messages[1].startswith("load 2 of 18: 4 streams, k = auto, temperature 0; about ")
    assert caplog.messages[-1].startswith("load 18 of 18: 4 streams, k = 5, temperature 0.7; about ")
