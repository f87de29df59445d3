"""A run of `tests.system.fuzz_api`; long in `make soak`; `python -m tests.system.fuzz_api` takes a seed."""

from __future__ import annotations

import itertools

import pytest

from services.launch.local import LocalCluster
from tests.soak import length
from tests.system.conftest import READY_TIMEOUT_SECONDS, cluster_config

pytest.importorskip("schemathesis", reason="`make setup-clients` installs schemathesis")

from tests.system.fuzz_api import Resources, assert_nothing_kept, fuzz, warm_up
from tests.system.fuzzing import programs

FULL = ("router.max_waiting_requests=2",)
SECONDS, LEAST_ANSWERS = length((3.0, 20), (240.0, 1000))


@pytest.mark.parametrize("settings", length([FULL], [(), FULL]), ids=str)
def test_every_answer_is_as_the_document_says(settings: tuple[str, ...]) -> None:
    with LocalCluster(cluster_config(*settings)) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        warm_up(cluster.url)
        before = [Resources.of(child) for child in programs(cluster)]
        num_answers, seeds = 0, itertools.count(2026)
        while num_answers < LEAST_ANSWERS:  # once, unless the machine is busy
            figures = fuzz(cluster.url, SECONDS, seed=next(seeds))
            assert not figures.failures, "\n".join(figures.failures[:10])
            num_answers += figures.codes.total()
        assert_nothing_kept(cluster, before)
