"""A short run of `tests.system.fuzz_api`; `python -m tests.system.fuzz_api --minutes 10` is a long one."""

from __future__ import annotations

import pytest

from services.launch.local import LocalCluster
from tests.system.conftest import READY_TIMEOUT_SECONDS, cluster_config

pytest.importorskip("schemathesis", reason="`make setup-clients` installs schemathesis")

from tests.system.fuzz_api import Resources, assert_nothing_kept, fuzz, warm_up
from tests.system.fuzzing import programs

SECONDS = 20.0


@pytest.mark.parametrize("settings", [(), ("router.max_waiting_requests=2",)], ids=["roomy", "full"])
def test_every_answer_is_as_the_document_says(settings: tuple[str, ...]) -> None:
    with LocalCluster(cluster_config(*settings)) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        warm_up(cluster.url)
        before = [Resources.of(child) for child in programs(cluster)]
        figures = fuzz(cluster.url, SECONDS, seed=2026)
        assert not figures.failures, "\n".join(figures.failures[:10])
        assert figures.codes.total() > 100
        assert_nothing_kept(cluster, before)
