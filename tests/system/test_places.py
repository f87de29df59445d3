"""Two draft workers in each of two zones, those of the other zone behind delaying proxies: real streams, and engines
that only sleep. The same in virtual time, and more of it: `tests/cluster/coordination/test_pools_of_drafts.py`."""

from __future__ import annotations

import pytest

from bench.in_process import SIMULATED, SimulatedCluster, Way
from cluster.config.file import load_config
from cluster.simulated_engines.tokens import token_at
from cluster.speculation.noise import NoiseKey
from tests.waiting import eventually

FAR_MS = 200  # so far that a near worker answers sooner even where other work delays it
NUM_STREAMS = 4
SETTINGS = (
    *SIMULATED,
    "draft.replicas=4",
    "simulation.acceptance=0.8",
    "simulation.target_step_ms=[[1, 20]]",
    "target.max_model_len=100000",
    "placement.zone=a",
    # Drafts for all, whether or not that pays by the times that are measured here.
    "speculation.controller=fixed",
    "speculation.max_run_ahead=0",
    "speculation.draft_timeout_ms=60000",
)
RIGHT, WRONG = ("a", "a", "b", "b"), ("b", "b", "a", "a")


@pytest.mark.parametrize("zones", [RIGHT, WRONG], ids=["right", "wrong"])
def test_the_near_ones_draft_whatever_labels_say_and_the_far_ones_while_they_are_gone(zones: tuple[str, ...]) -> None:
    ways = [Way(0 if index < 2 else FAR_MS, f"zone={zone} host=h{index}") for index, zone in enumerate(zones)]
    with SimulatedCluster(load_config(None, SETTINGS), ways=ways) as cluster:

        def near_and_far() -> tuple[int, int]:
            numbers = [worker.num_sequences for worker in cluster.workers]
            return sum(numbers[:2]), sum(numbers[2:])

        names = [cluster.submit(50_000) for _ in range(NUM_STREAMS)]
        assert eventually(lambda: near_and_far() == (NUM_STREAMS, 0))
        for near in (0, 1):
            cluster.cut_off(near)
        assert eventually(lambda: near_and_far() == (0, NUM_STREAMS))
        for near in (0, 1):
            cluster.bring_back(near)
        assert eventually(lambda: near_and_far() == (NUM_STREAMS, 0))
        for name in names:
            cluster.target.abort(name)
        for name in names:
            seed, tokens = int(name), list(cluster.answers[name].token_ids)
            key, vocab_size = NoiseKey.derive(seed, 0), cluster.target.model.vocab_size
            assert tokens == [token_at(key, 32 + place, vocab_size) for place in range(len(tokens))]
