from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.diagnosis.waterfall import Waterfall, predicted_draft, waterfall
from cluster.speculation.speed import RoundCosts, speedup
from tests.cluster.diagnosis.clusters import FormulaCluster

CLUSTER = FormulaCluster(row_seconds=0.0004)


def fall(cluster: FormulaCluster, *, equal: float | None = None, earlier: float | None = None) -> Waterfall:
    plain, drafted = cluster.measured(0), cluster.measured(5)
    return waterfall(
        plain, drafted, predicted_draft(cluster.measured(5, streams=1), drafted, equal=equal, earlier=earlier), 0.0005
    )


def test_it_begins_at_the_formula_and_ends_at_what_was_measured() -> None:
    found = fall(CLUSTER)
    costs = RoundCosts(CLUSTER.draft_seconds, CLUSTER.decode_seconds, CLUSTER.round_trip_seconds)
    assert found.promised == pytest.approx(speedup(0.8, 5, costs))
    assert found.promised - sum(stage.loss for stage in found.stages) == pytest.approx(found.stages[-1].speedup)
    assert found.unexplained == pytest.approx(0.0, abs=1e-6)
    losses = {stage.cause: stage.loss for stage in found.stages}
    dearest = max(losses, key=lambda cause: losses[cause])
    assert dearest == "verify takes more than a decode: bandwidth full"


def test_what_the_loop_does_between_short_steps_is_bookkeeping_that_drafts_spare() -> None:
    found = fall(FormulaCluster(decode_seconds=0.0006, draft_seconds=0.0001, bookkeeping_seconds=0.0003))
    losses = {stage.cause: stage.loss for stage in found.stages}
    tokens, (decode, wait) = sum(0.8**place for place in range(6)), (0.0006, 0.001)
    without, with_it = tokens * decode / (decode + wait), tokens * (decode + 0.0003) / (decode + wait + 0.0003)
    assert losses["bookkeeping around the steps"] == pytest.approx(without - with_it)
    assert found.unexplained == pytest.approx(0.0, abs=1e-6)


def test_time_without_work_is_not_explained() -> None:
    plain, drafted = CLUSTER.measured(0), replace(CLUSTER, idle_share=0.2).measured(5)
    predicted = predicted_draft(CLUSTER.measured(5, streams=1), drafted, equal=None, earlier=None)
    assert waterfall(plain, drafted, predicted, 0.0005).unexplained == pytest.approx(0.25)


def test_each_cause_takes_what_it_costs() -> None:
    drifted = {stage.cause: stage.loss for stage in fall(CLUSTER, earlier=0.9).stages}
    assert drifted["drift of the draft"] > 0.3
    assert drifted["draft sampled at another temperature"] == pytest.approx(0.0)
    cold = {stage.cause: stage.loss for stage in fall(CLUSTER, equal=0.9).stages}
    assert cold["draft sampled at another temperature"] == pytest.approx(drifted["drift of the draft"])


def test_a_draft_that_is_slower_beside_others_is_told_apart() -> None:
    plain, drafted = CLUSTER.measured(0), replace(CLUSTER, draft_seconds=0.002).measured(5)
    found = waterfall(
        plain, drafted, predicted_draft(CLUSTER.measured(5, streams=1), drafted, equal=None, earlier=None), 0.0005
    )
    losses = {stage.cause: stage.loss for stage in found.stages}
    costs = [RoundCosts(seconds, 0.020, 0.0005) for seconds in (0.0005, 0.002)]
    assert losses["draft slower than predicted"] == pytest.approx(speedup(0.8, 5, costs[0]) - speedup(0.8, 5, costs[1]))
    assert found.unexplained == pytest.approx(0.0, abs=1e-6)
