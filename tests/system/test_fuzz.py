"""A run of `tests.system.fuzz_api`; long in `make soak`; `python -m tests.system.fuzz_api` takes a seed."""

from __future__ import annotations

import pytest

from services.launch.local import LocalCluster
from tests.soak import length
from tests.system.conftest import READY_TIMEOUT_SECONDS, cluster_config

pytest.importorskip("schemathesis", reason="`make setup-clients` installs schemathesis")

from tests.system.fuzz_api import Resources, assert_nothing_kept, fuzz, warm_up
from tests.system.fuzzing import programs

SECONDS = length(6.0, 240.0)


@pytest.mark.parametrize("settings", [(), ("router.max_waiting_requests=2",)], ids=["roomy", "full"])
def test_every_answer_is_as_the_document_says(settings: tuple[str, ...]) -> None:
    with LocalCluster(cluster_config(*settings)) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        warm_up(cluster.url)
        before = [Resources.of(child) for child in programs(cluster)]
        figures = fuzz(cluster.url, SECONDS, seed=2026)
        assert not figures.failures, "\n".join(figures.failures[:10])
        assert figures.codes.total() > length(20, 1000)
        assert_nothing_kept(cluster, before)
