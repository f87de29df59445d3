"""A Ray cluster of a head and four nodes, shared by the tests that need several."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.fault_load import Answers, Question, make_questions, under_load
from bench.fault_ray import TWO_OF_EACH, RayFaultCluster, RayNodes
from bench.faults import SETTINGS
from cluster.config.file import load_config
from services.launch.local import LocalCluster
from tests.soak import length
from tests.system.conftest import READY_TIMEOUT_SECONDS

NUM_STREAMS = length(4, 8)
MAX_TOKENS = 80
# A request takes about a second. A drain waits this long, and 5 s more, for a request of a frozen program.
SHORT_DRAINS = ("router.drain_seconds=7", "target.drain_seconds=7", "draft.drain_seconds=3")
UNSCALED = ("ray.scaling.mode=manual", "draft.replicas=2")


@pytest.fixture(scope="package")
def questions() -> list[Question]:
    return make_questions(NUM_STREAMS, MAX_TOKENS)


@pytest.fixture(scope="package")
def expected(questions: list[Question]) -> Answers:
    """Answers of a local cluster without faults."""
    with LocalCluster(load_config(None, ["router.port=0", *SETTINGS["simulated"]])) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        tally, _ = under_load([cluster.url], questions, None, lambda: "", 0.1)
    assert tally.num_failed == 0
    return tally.answers


@pytest.fixture(scope="package")
def running(expected: Answers) -> Iterator[RayFaultCluster]:
    """Two routers, two targets and two drafts with simulated engines, as the test before left them."""
    nodes = RayNodes()
    try:
        with RayFaultCluster(nodes, [*SETTINGS["simulated"], *TWO_OF_EACH, *SHORT_DRAINS]) as cluster:
            yield cluster
    finally:
        nodes.close()


@pytest.fixture
def cluster(running: RayFaultCluster) -> RayFaultCluster:
    """The same with pools of a fixed size and the model of `expected`; how fast and how good its drafts are is as the
    test before left it. A roll back takes as long as most tests, so that it is left to who needs it."""
    config = running.config
    if (config.ray.scaling.mode, config.simulation.vocab_size) != ("manual", None):
        running.roll(*UNSCALED, "simulation.vocab_size=null")
    return running


@pytest.fixture
def folder() -> Iterator[Path]:
    """For temporary files, whose path is short enough for Ray's sockets. Ray may write to it until the end."""
    with tempfile.TemporaryDirectory(prefix="or-", ignore_cleanup_errors=True) as name:
        yield Path(name)
