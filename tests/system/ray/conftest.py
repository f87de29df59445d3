"""A Ray cluster of a head and four nodes, shared by the tests that need several."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.fault_client import Question
from bench.fault_load import Answers, make_questions, under_load
from bench.fault_ray import TWO_OF_EACH, RayFaultCluster, RayNodes
from bench.faults import SETTINGS
from cluster.config_file import load_config
from services.launch.local import LocalCluster
from tests.system.conftest import READY_TIMEOUT_SECONDS

NUM_STREAMS = 8
MAX_TOKENS = 80


@pytest.fixture(scope="package")
def questions() -> list[Question]:
    return make_questions(NUM_STREAMS, MAX_TOKENS)


@pytest.fixture(scope="package")
def expected(questions: list[Question]) -> Answers:
    """What a local cluster answers, to which nothing happens."""
    with LocalCluster(load_config(None, ["router.port=0", *SETTINGS["simulated"]])) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        tally, _ = under_load([cluster.url], questions, None, lambda: "", 0.1)
    assert tally.num_failed == 0
    return tally.answers


@pytest.fixture(scope="package")
def cluster(expected: Answers) -> Iterator[RayFaultCluster]:
    """Two routers, two targets and two drafts with simulated engines. What a test does to it, it mends."""
    nodes = RayNodes()
    try:
        with RayFaultCluster(nodes, [*SETTINGS["simulated"], *TWO_OF_EACH]) as running:
            yield running
    finally:
        nodes.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """For temporary files, whose path is short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="or-") as name:
        yield Path(name)
