from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.diagnosis.findings import GOOD_ACCEPTANCE, GOOD_COST_RATIO, Finding, findings
from cluster.diagnosis.measurements import Measured, StepTotals, TimeCurve, WorkerThreads
from cluster.diagnosis.speed import SpeedModel
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
        replace(HEALTHY, num_threads=4),
        replace(HEALTHY, num_threads=8, decode_seconds=0.040, draft_seconds=0.020, round_trip_seconds=0.120),
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


def test_what_a_round_takes_is_reckoned_at_the_depth_that_is_best_when_mended() -> None:
    """Deep rounds have less of their first draft step, and fewer sequences in a step, than those of a poor draft."""
    sick = FormulaCluster(
        acceptance=0.4, row_seconds=0.0005, first_draft_seconds=0.002, missed_steps=0.03, bookkeeping_seconds=0.001
    )
    mended = replace(sick, acceptance=GOOD_ACCEPTANCE)
    assert sick.best_depth < mended.best_depth
    (finding,) = findings(sick.examine())
    assert finding.tokens_per_second == pytest.approx(mended.tokens_per_second, rel=0.01)


def test_no_more_is_promised_than_the_depth_that_may_be_asked_for_gives() -> None:
    sick = SICK["low acceptance"][1]
    (finding,) = findings(replace(sick.examine(), max_depth=2))
    assert finding.tokens_per_second == pytest.approx(
        replace(sick, acceptance=GOOD_ACCEPTANCE).measured(2).counts.tokens_per_second, rel=0.01
    )


def test_a_draft_that_was_better_is_taken_to_become_so_again() -> None:
    sick = SICK["low acceptance"][1]
    healthy = replace(sick, acceptance=0.9)
    (finding,) = findings(sick.examine(), earlier_survival=healthy.measured(5).counts.survival)
    assert finding.tokens_per_second == pytest.approx(healthy.tokens_per_second, rel=0.02)
    (as_bad_as_ever,) = findings(sick.examine(), earlier_survival=sick.measured(5).counts.survival)
    assert [as_bad_as_ever] == findings(sick.examine())


def test_oversubscribed_threads_are_one_finding_without_a_prediction() -> None:
    threads = [
        WorkerThreads("target", "target a:1", 8, 2),
        WorkerThreads("target", "target a:2", 2, 2),
        WorkerThreads("target", "target a:3", 8, 0),  # its cores are unknown
        WorkerThreads("draft", "draft a:4", 4, 1),
    ]
    (finding,) = findings(replace(HEALTHY.examine(), threads=threads))
    assert finding.what == "target a:1: 8 threads compute on 2 cores; draft a:4: 4 threads compute on 1 cores"
    assert finding.remedy.startswith("set target.threads and draft.threads to null")
    assert (finding.tokens_per_second, finding.loss) == (None, None)


@pytest.mark.parametrize(
    ("limit", "parts", "what", "remedy"),
    [
        (
            "output_token_ms",
            {"prefill": StepTotals(10, 6.0)},
            "60 % of the targets' time are steps with prompts",
            "max_prefill_ms",
        ),
        (
            "output_token_ms",
            {"verify": StepTotals(10, 7.0)},
            "70 % of the targets' time are steps without",
            "max_num_seqs",
        ),
        ("output_token_ms", {"wait_seconds": 5.0}, "50 % of the targets' time are waits for drafts", "draft.replicas"),
        ("first_token_ms", {"prefill": StepTotals(10, 6.0)}, "60 %", "raise target.max_prefill_ms"),
        (
            "first_token_ms",
            {"num_preemptions": 1.0, "waiting_seconds": 30.0},
            "requests wait for blocks",
            "kv_cache_bytes",
        ),
    ],
)
def test_a_missed_limit_is_named_with_what_takes_the_time(
    limit: str, parts: dict[str, object], what: str, remedy: str
) -> None:
    cluster = HEALTHY.examine()
    none = {"verify": StepTotals(), "decode": StepTotals(), "prefill": StepTotals(), "wait_seconds": 0.0}

    def missed(num_kept: float) -> list[Finding]:
        counts = replace(
            cluster.auto.counts, busy_seconds=10.0, within_limits={limit: (num_kept, 200.0)}, **none | parts
        )
        found = findings(replace(cluster, auto=replace(cluster.auto, counts=counts)))
        return [finding for finding in found if finding.name == f"{limit} missed"]

    assert missed(198) == []
    (finding,) = missed(197)
    assert "197 of 200 requests were within the limit" in finding.what
    assert what in finding.what
    assert remedy in finding.remedy


def test_oversubscribed_threads_come_before_a_loss_that_is_predicted() -> None:
    (poor_draft,) = findings(SICK["low acceptance"][1].examine())
    found = findings(replace(SICK["low acceptance"][1], num_threads=8).examine())
    assert found[0].name == "threads oversubscribed"
    assert found[1:] == [poor_draft]


def test_prompts_are_reckoned_to_take_less_beside_a_quick_draft() -> None:
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
    as_quick = fitting + (beside - fitting) * mended.draft_seconds / sick.draft_seconds
    assert finding.tokens_per_second == pytest.approx(1.0 / (1.0 / mended.tokens_per_second + as_quick), rel=0.02)


def with_prompts(one: Measured, seconds: float) -> Measured:
    """With prompts that add so much to the steps for each token."""
    counts, added = one.counts, seconds * one.counts.num_tokens
    return replace(one, counts=replace(counts, seconds=counts.seconds + added, prefill=StepTotals(0.0, added)))


def test_of_several_the_dearest_comes_first() -> None:
    cluster = replace(HEALTHY, acceptance=0.3, num_streams=8, num_running=2, num_preemptions=1)
    found = findings(cluster.examine())
    assert [finding.name for finding in found] == ["KV cache exhausted", "low acceptance"]
    losses = [finding.loss or 0.0 for finding in found]
    assert losses == sorted(losses, reverse=True)


def test_break_even_acceptance_is_where_speculation_begins_to_pay() -> None:
    cluster = replace(HEALTHY, round_trip_seconds=0.010, draft_seconds=0.004)
    even = SpeedModel.of(cluster.examine()).break_even_acceptance()
    assert even is not None
    for rate, pays in ((even + 0.03, True), (even - 0.03, False)):
        assert (replace(cluster, acceptance=rate).best_depth > 0) is pays
    hopeless = replace(HEALTHY, draft_seconds=0.030)
    assert SpeedModel.of(hopeless.examine()).break_even_acceptance() is None


def test_a_curve_of_steps_never_falls_and_goes_on() -> None:
    curve = TimeCurve(
        [(4, StepTotals(10, 0.2)), (8, StepTotals(10, 0.19)), (16, StepTotals(10, 0.3)), (2, StepTotals())]
    )
    assert curve.at(1) == curve.at(4) == curve.at(8) == 0.02
    assert curve.at(12) == pytest.approx(0.025)
    assert curve.at(24) == pytest.approx(0.04)


def test_steps_of_about_as_many_rows_are_taken_together() -> None:
    curve = TimeCurve([(8, StepTotals(10, 0.1)), (20, StepTotals(10, 0.2)), (22, StepTotals(30, 1.0))])
    assert curve.at(21.5) == pytest.approx(0.03)


def test_where_nothing_is_drafted_that_is_what_is_wrong() -> None:
    examination = HEALTHY.examine()
    plain = [replace(one, counts=HEALTHY.measured(0).counts) for one in (*examination.fixed, examination.alone)]
    examination = replace(examination, fixed=plain[:-1], alone=plain[-1], auto=plain[0])
    assert [(finding.name, finding.loss) for finding in findings(examination)] == [("no drafts", None)]
    crowded = replace(examination, threads=[WorkerThreads("target", "target a:1", 8, 2)])
    assert [finding.name for finding in findings(crowded)] == ["threads oversubscribed", "no drafts"]


def test_drafts_that_never_come_in_time_are_reckoned_to_give_nothing() -> None:
    examination = HEALTHY.examine()
    late = replace(HEALTHY.measured(0).counts, draft=StepTotals(100.0, 1.0))
    found = replace(examination, fixed=[replace(one, counts=late) for one in examination.fixed])
    assert SpeedModel.of(found).best_depth() == 0
