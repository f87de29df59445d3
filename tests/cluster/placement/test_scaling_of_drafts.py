"""The policy with a real coordinator's measures, in virtual time: it finds what pays, and stays there."""

from __future__ import annotations

import itertools

from bench.in_process import SIMULATED
from cluster.config.file import load_config
from cluster.placement.registry import Announcement, Load
from cluster.placement.scaling import Scaler
from cluster.simulator.drafts import SimulatedDraft
from cluster.simulator.virtual import VirtualCluster
from tests.soak import length

INTERVAL_SECONDS = 5.0
MOST = 8
SECONDS = length(60.0, 100.0)


class ScaledCluster:
    """One target, whose draft workers come and go as the policy says."""

    def __init__(self, draft_step_ms: str, num_streams: int, *overrides: str) -> None:
        config = load_config(
            None,
            [
                *SIMULATED,
                "simulation.acceptance=0.8",
                "simulation.target_step_ms=[[1, 20], [64, 30]]",
                f"simulation.draft_step_ms={draft_step_ms}",
                "target.max_num_batched_tokens=2048",
                "target.max_model_len=100000",
                "speculation.max_run_ahead=0",  # which a worker does all the time, however few it drafts for
                "draft.max_num_batched_tokens=2048",
                f"ray.draft.max_replicas={MOST}",
                "ray.scaling.upscale_delay_seconds=10",
                "ray.scaling.downscale_delay_seconds=20",
                *overrides,
            ],
        )
        drafts = [SimulatedDraft(config.simulation, round_trip_seconds=0.001)] * MOST
        self._cluster = VirtualCluster(config, drafts)
        for draft in self._cluster.pool.drafts[1:]:
            draft.kill()
        self._policy = Scaler(config)
        self.numbers: list[int] = []
        for _ in range(num_streams):
            self._cluster.submit(50_000)

    def run(self, seconds: float) -> float:
        """Returns the tokens a second of the last interval."""
        rate = 0.0
        for _ in range(int(seconds / INTERVAL_SECONDS)):
            rate = self._cluster.run(INTERVAL_SECONDS)
            up = [draft for draft in self._cluster.pool.drafts if draft.is_up]
            load = Load(num_running=1, demand=self._cluster.target.load().demand)
            target = Announcement("t", "target", "t:1", 1, load=load)
            drafts = [Announcement(draft.address, "draft", draft.address, 1, load=Load()) for draft in up]
            *_, decision = self._policy.decide([target], drafts, self._cluster.time.now())
            for draft in self._cluster.pool.drafts:
                if draft.is_up and draft in up[decision.settled :]:
                    draft.kill()
                elif not draft.is_up and len(up) < decision.settled:
                    draft.start()
                    up.append(draft)
            self.numbers.append(decision.settled)
        return rate

    @property
    def num_turns(self) -> int:
        """How often it was changed in the other direction than before."""
        changes = [after - before for before, after in itertools.pairwise(self.numbers)]
        signs = [change > 0 for change in changes if change]
        return sum(before != after for before, after in itertools.pairwise(signs))


def test_drafts_that_slow_down_with_their_batch_are_shared_out_over_more_workers() -> None:
    cluster = ScaledCluster("[[1, 1], [4, 8], [8, 16], [2048, 60]]", num_streams=8)
    alone = cluster.run(INTERVAL_SECONDS)
    together = cluster.run(SECONDS)
    assert cluster.numbers[-1] >= 4
    assert together > 1.3 * alone
    assert cluster.num_turns <= 2, cluster.numbers


def test_drafts_that_cost_the_same_in_any_batch_stay_on_one_worker() -> None:
    cluster = ScaledCluster("[[1, 2], [64, 2]]", num_streams=8)
    cluster.run(SECONDS)
    assert set(cluster.numbers) == {1}


def test_sequences_that_find_no_room_bring_more_workers() -> None:
    cluster = ScaledCluster("[[1, 2], [64, 2]]", 8, "draft.max_num_seqs=3")
    cluster.run(SECONDS)
    assert cluster.numbers[-1] == 3
    assert cluster.num_turns == 0, cluster.numbers


def test_drafts_that_do_not_pay_are_given_up() -> None:
    cluster = ScaledCluster("[[1, 40]]", 2, "ray.draft.min_replicas=0")
    cluster.run(SECONDS)
    assert cluster.numbers[-1] == 0
    assert cluster.num_turns == 0, cluster.numbers
