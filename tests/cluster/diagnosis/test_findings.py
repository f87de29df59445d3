from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cluster.diagnosis.findings import GOOD_ACCEPTANCE, GOOD_COST_RATIO, findings
from cluster.diagnosis.measurements import Measured, StartTimes, StepCurve, Steps
from cluster.diagnosis.speed import Speed
from cluster.planning.options import LOCAL_ROUND_TRIP_SECONDS
from tests.cluster.diagnosis.clusters import FormulaCluster

HEALTHY = FormulaCluster()
SICK = {
    "low acceptance": [replace(HEALTHY, acceptance=rate) for rate in (0.0, 0.45)],
    "draft the bottleneck": [replace(HEALTHY, draft_seconds=seconds) for seconds in (0.008, 0.019)],
    "network dominates": [replace(HEALTHY, round_trip_seconds=seconds) for seconds in (0.010, 0.040)],
    "KV cache exhausted": [
        replace(HEALTHY, num_streams=8, num_running=running, num_preemptions=3) for running in (2, 5)
    ],
    "threads oversubscribed": [
        replace(HEALTHY, start=StartTimes(HEALTHY.start.own, {4: seconds, 16: seconds + 0.001}))
        for seconds in (0.012, 0.004)
    ],
}
MENDED = {
    "low acceptance": {"acceptance": GOOD_ACCEPTANCE},
    "draft the bottleneck": {"draft_seconds": GOOD_COST_RATIO * HEALTHY.decode_seconds},
    "network dominates": {"round_trip_seconds": LOCAL_ROUND_TRIP_SECONDS},
    "KV cache exhausted": {"num_running": 8},
}
CASES = [(name, cluster) for name, clusters in SICK.items() for cluster in clusters]


def test_of_a_healthy_cluster_there_are_none() -> None:
    assert findings(HEALTHY.examine()) == []


@pytest.mark.parametrize(("name", "cluster"), CASES)
def test_a_sickness_is_named_first_and_alone(name: str, cluster: FormulaCluster) -> None:
    assert [finding.name for finding in findings(cluster.examine())] == [name]


@pytest.mark.parametrize(("name", "cluster"), [case for case in CASES if case[0] in MENDED])
def test_its_loss_is_what_mending_brings(name: str, cluster: FormulaCluster) -> None:
    (finding,) = findings(cluster.examine())
    mended = replace(cluster, **MENDED[name])
    assert finding.tokens_per_second == pytest.approx(mended.tokens_per_second, rel=0.02)
    assert finding.loss == pytest.approx(1.0 - cluster.tokens_per_second / mended.tokens_per_second, abs=0.02)


def test_steps_that_too_many_threads_slow_down_are_reckoned_between_start_and_load() -> None:
    sick = SICK["threads oversubscribed"][1]
    (finding,) = findings(sick.examine())
    # 4 ms beside 18 at start, where nothing else runs, and beside 20 under the load
    fitting = replace(HEALTHY, decode_seconds=0.020 * 0.004 / math.sqrt(0.018 * 0.020))
    assert finding.tokens_per_second == pytest.approx(fitting.tokens_per_second, rel=0.02)


def test_too_many_threads_are_named_where_every_step_has_prompts() -> None:
    found = SICK["threads oversubscribed"][1].examine()
    counts = found.plain.counts
    busy = replace(found.plain, counts=replace(counts, decode=Steps(), prefill=counts.decode))
    (finding,) = findings(replace(found, plain=busy))
    assert finding.name == "threads oversubscribed"


def test_prompts_beside_a_slow_draft_are_reckoned_to_take_what_they_do_without_drafts() -> None:
    sick, (fitting, beside) = SICK["draft the bottleneck"][0], (0.0003, 0.0006)  # for each token of an answer
    found = sick.examine()
    found = replace(
        found,
        plain=with_prompts(found.plain, fitting),
        fixed=[with_prompts(one, beside) for one in found.fixed],
        auto=with_prompts(found.auto, beside),
    )
    (finding,) = findings(found)
    mended = replace(sick, **MENDED["draft the bottleneck"])
    assert finding.tokens_per_second == pytest.approx(1.0 / (1.0 / mended.tokens_per_second + fitting), rel=0.02)


def with_prompts(one: Measured, seconds: float) -> Measured:
    """With prompts that add so much to the steps for each token."""
    counts, added = one.counts, seconds * one.counts.num_tokens
    return replace(one, counts=replace(counts, seconds=counts.seconds + added, prefill=Steps(0.0, added)))


def test_of_several_the_dearest_comes_first() -> None:
    cluster = replace(HEALTHY, acceptance=0.3, num_streams=8, num_running=2, num_preemptions=1)
    found = findings(cluster.examine())
    assert [finding.name for finding in found] == ["KV cache exhausted", "low acceptance"]
    losses = [finding.loss or 0.0 for finding in found]
    assert losses == sorted(losses, reverse=True)


def test_break_even_acceptance_is_where_speculation_begins_to_pay() -> None:
    cluster = replace(HEALTHY, round_trip_seconds=0.010, draft_seconds=0.004)
    even = Speed.of(cluster.examine()).break_even_acceptance()
    assert even is not None
    for rate, pays in ((even + 0.03, True), (even - 0.03, False)):
        assert (replace(cluster, acceptance=rate).best_depth > 0) is pays
    hopeless = replace(HEALTHY, draft_seconds=0.030)
    assert Speed.of(hopeless.examine()).break_even_acceptance() is None


def test_a_curve_of_steps_never_falls_and_goes_on() -> None:
    curve = StepCurve([(4, Steps(10, 0.2)), (8, Steps(10, 0.19)), (16, Steps(10, 0.3)), (2, Steps())])
    assert curve.at(1) == curve.at(4) == curve.at(8) == 0.02
    assert curve.at(12) == pytest.approx(0.025)
    assert curve.at(24) == pytest.approx(0.04)


def test_steps_of_about_as_many_rows_are_taken_together() -> None:
    curve = StepCurve([(8, Steps(10, 0.1)), (20, Steps(10, 0.2)), (22, Steps(30, 1.0))])
    assert curve.at(21.5) == pytest.approx(0.03)


def test_where_nothing_is_drafted_that_is_what_is_wrong() -> None:
    examination = HEALTHY.examine()
    plain = [replace(one, counts=HEALTHY.measured(0).counts) for one in (*examination.fixed, examination.alone)]
    found = findings(replace(examination, fixed=plain[:-1], alone=plain[-1], auto=plain[0]))
    assert [(finding.name, finding.loss) for finding in found] == [("no drafts", None)]
