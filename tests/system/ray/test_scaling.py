"""The autoscaler under load: draft workers come where they pay, and go when nobody needs them; no token differs."""

from __future__ import annotations

import time

from bench.fault_load import Answers, Question, under_load
from bench.fault_ray import READY_SECONDS, RayFaultCluster
from cluster.placement.scaling import Decision
from services.launch.ray.registry_actor import find_decisions
from tests.soak import only_in_soak
from tests.waiting import eventually

SCALED = (
    "ray.scaling.mode=act",
    "ray.scaling.upscale_delay_seconds=2",
    "ray.scaling.downscale_delay_seconds=4",
    "ray.target.min_replicas=2",
    "ray.target.max_replicas=2",
    # A worker with half of the sequences is worth much more to each.
    "simulation.draft_step_ms=[[1, 1], [2, 3], [4, 8], [8, 16], [2048, 60]]",
    "simulation.acceptance=0.85",
)


@only_in_soak
def test_drafts_follow_what_they_bring(cluster: RayFaultCluster, questions: list[Question], expected: Answers) -> None:
    # No request fails and no token differs in a rolling update, through Serve's proxy: it replaces the routers, too.
    tally, _ = under_load([cluster.nodes.proxy_url], questions, expected, lambda: str(cluster.roll(*SCALED)), 1.0)
    assert tally.num_sent > len(questions), "the load ended before the update"
    assert (tally.num_failed, tally.num_different_tokens) == (0, 0), tally.errors
    # As many as deployed, for as long as nothing is measured; but one where the targets of before, which had
    # measured, were listed for long enough with nothing to draft for.
    assert eventually(lambda: len(cluster.members("draft")) in (1, 2), READY_SECONDS), decisions(cluster)

    def wait_for_three() -> str:
        assert eventually(lambda: len(cluster.members("draft")) == 3, READY_SECONDS), decisions(cluster)
        time.sleep(4.0)  # they are not taken away again, even if a busy machine lists one of them late
        while not (last := decided(cluster)):
            time.sleep(0.1)
        return f"{last['draft'].current} draft workers"

    tally, note = under_load(cluster.urls, questions, expected, wait_for_three, 1.0)
    assert (tally.num_failed, tally.num_different_tokens) == (0, 0), tally.errors
    assert note == "3 draft workers", decisions(cluster)
    assert eventually(lambda: len(cluster.members("draft")) == 1 and _is_idle(cluster), READY_SECONDS), decisions(
        cluster
    )


def decided(cluster: RayFaultCluster) -> dict[str, Decision]:
    """The last decision about each pool. Empty if the registry does not answer in time."""
    return {decision.pool: decision for decision in find_decisions(cluster.application.name)}


def _is_idle(cluster: RayFaultCluster) -> bool:
    last = decided(cluster)
    return (
        last.keys() == {"target", "draft"}
        and last["target"].settled == 2
        and last["draft"].reason == "no sequences to draft for"
    )


def decisions(cluster: RayFaultCluster) -> str:
    return repr(find_decisions(cluster.application.name))
