"""A cluster with simulated engines and a simulated network, as the launcher starts it."""

from __future__ import annotations

import httpx

from cluster.config.file import load_config
from services.launch.local import LocalCluster
from tests.system.client import eventually
from tests.system.conftest import READY_TIMEOUT_SECONDS
from tests.waiting import WAIT_S

SETTINGS = (
    "target.engine=simulated",
    "draft.drafter=simulated",
    "simulation.round_trip_ms=10",
    "simulation.target_step_ms=[[1, 20]]",
    "simulation.acceptance=0.9",
    "router.port=0",
)


def test_it_serves_and_speculates_through_the_delay() -> None:
    with LocalCluster(load_config(None, SETTINGS)) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)

        def generate(k: int | str) -> str:
            body = {"prompt": "x", "seed": 5, "max_tokens": 60, "num_speculative_tokens": k}
            response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=WAIT_S)
            assert response.json()["model"] == "simulated"
            return str(response.json()["choices"][0]["text"])

        def round_trip_seconds() -> float:
            generate(4)  # an estimate from few replies may be far too low
            metrics = httpx.get(cluster.targets[0].metrics_url, timeout=WAIT_S).text
            (found,) = [line for line in metrics.splitlines() if line.startswith("outrider_link_round_trip_seconds{")]
            return float(found.rpartition(" ")[2])

        assert generate(0) == generate(4) != ""
        assert eventually(lambda: round_trip_seconds() > 0.005)  # without the delay it is below a millisecond


def test_drafts_beside_targets_are_for_these_alone() -> None:
    settings = (*SETTINGS, "target.replicas=2", "draft.replicas=2", "draft.placement=sidecar")
    with LocalCluster(load_config(None, settings)) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        assert len(cluster.drafts) == 4
        drafts = [_drafts_of(target.metrics_url) for target in cluster.targets]
    assert [len(own) for own in drafts] == [2, 2]
    assert not drafts[0] & drafts[1]


def _drafts_of(url: str) -> set[str]:
    """The draft workers that a target has links to."""
    lines = httpx.get(url, timeout=WAIT_S).text.splitlines()
    return {line.split('draft="')[1].split('"')[0] for line in lines if line.startswith("outrider_link_bytes_total{")}
