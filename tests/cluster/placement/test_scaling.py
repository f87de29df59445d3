"""The autoscaler's policy: what targets and draft workers follow, its bounds, and that it is steady."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.config.file import load_config
from cluster.placement.registry import Announcement, Load, Pool
from cluster.placement.scaling import Decision, Scaler
from cluster.speculation.demand import NUM_BATCHES, DraftDemand

AT_ONCE = ("ray.scaling.upscale_delay_seconds=0", "ray.scaling.downscale_delay_seconds=0")
BOUNDED = ("ray.scaling.mode=act", "ray.target.max_replicas=8", "ray.draft.max_replicas=8")
GAIN = 0.05


def scaler(*overrides: str) -> Scaler:
    defaults = [*BOUNDED, "target.max_num_seqs=32", "draft.max_num_seqs=256", f"ray.scaling.draft_gain={GAIN}"]
    return Scaler(load_config(None, [*defaults, *AT_ONCE, *overrides]))


def members(pool: Pool, loads: Sequence[Load | None]) -> list[Announcement]:
    return [Announcement(f"{pool} {i}", pool, f"h:{i + 1}", 1, load=load) for i, load in enumerate(loads)]


def demand(num_sequences: int, *goodputs: float) -> DraftDemand:
    """The last of `goodputs` holds for all larger batches."""
    return DraftDemand(num_sequences, (*goodputs, *[goodputs[-1]] * (NUM_BATCHES - len(goodputs))))


def wanted_targets(loads: Sequence[Load], *overrides: str) -> int:
    return scaler(*overrides).decide(members("target", loads), (), 0.0)[0].settled


def wanted_drafts(demands: Sequence[DraftDemand | None], num_drafts: int, *overrides: str, kv_use: float = 0.1) -> int:
    loads = [Load(num_running=1, demand=of_target) for of_target in demands]
    drafts = members("draft", [Load(num_running=8, kv_use=kv_use)] * num_drafts)
    return scaler(*overrides).decide(members("target", loads), drafts, 0.0)[1].settled


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [
        ([Load()], 1),
        ([Load(num_running=16)], 1),
        ([Load(num_running=32)], 2),  # full by its sequences
        ([Load(num_running=2, kv_use=0.9)], 2),  # by its blocks
        ([Load(num_running=32, num_waiting=9, num_waiting_tokens=9000)], 4),
        ([Load(num_running=24), Load(num_running=24)], 2),
        ([Load(num_running=12), Load(num_running=11)], 1),
        ([Load(num_running=12), Load(num_running=13)], 2),  # one alone would be too full
        ([Load(kv_use=1.0, num_waiting_tokens=10**9)], 8),
        ([Load(), Load(), Load()], 1),
    ],
)
def test_targets_follow_how_full_they_are_and_what_waits(loads: list[Load], wanted: int) -> None:
    assert wanted_targets(loads) == wanted


def test_targets_stay_within_their_bounds() -> None:
    assert wanted_targets([Load(), Load(), Load()], "ray.target.min_replicas=2") == 2
    assert wanted_targets([Load(num_waiting_tokens=10**6)], "ray.target.max_replicas=3") == 3


class LatePool:
    """Targets that each run 16 requests and have places for 32; decisions every 20 seconds."""

    def __init__(self, num_targets: int) -> None:
        self.policy = scaler()
        self.num_targets = num_targets
        self.now = 0.0
        self.counts = [0, 0]

    def decide(self, num_limited: int = 0, num_late: int = 0, num_running: int = 16) -> int:
        """Lets `num_limited` requests of each target end, `num_late` of them late. Returns the wanted targets."""
        self.now += 20.0
        self.counts[0] += num_limited
        self.counts[1] += num_late
        load = Load(num_running=num_running, num_limited=self.counts[0], num_late=self.counts[1])
        return self.policy.decide(members("target", [load] * self.num_targets), (), self.now)[0].settled


def test_a_target_is_added_while_limits_are_missed() -> None:
    pool = LatePool(2)
    first = [pool.decide(100, 9) for _ in range(3)]
    assert first == [2, 2, 2], "less than a minute is known"
    assert pool.decide(100, 9) == 3
    pool.num_targets = 3
    pool.policy.asked("target", 3)
    assert [pool.decide(100, 9) for _ in range(3)] == [3, 3, 3], "answers that began before the change may be late"
    assert [pool.decide(100) for _ in range(6)] == [4, 4, 3, 3, 3, 3]


@pytest.mark.parametrize(("num_limited", "num_late"), [(1000, 10), (100, 0)])
def test_limits_are_for_99_of_100_requests(num_limited: int, num_late: int) -> None:
    pool = LatePool(2)
    assert [pool.decide(num_limited, num_late) for _ in range(6)] == [2] * 6


def test_one_late_request_is_chance() -> None:
    pool = LatePool(2)
    assert [pool.decide(10, int(step == 3)) for step in range(6)] == [2] * 6


def test_targets_are_not_removed_to_a_use_at_which_requests_were_late() -> None:
    pool = LatePool(2)
    assert [pool.decide(100, 9) for _ in range(4)][-1] == 3
    pool.num_targets = 3
    pool.policy.asked("target", 3)
    assert [pool.decide(100, num_running=11) for _ in range(9)] == [3] * 9
    assert pool.decide(100, num_running=2) == 1
    pool.now += 3600.0
    assert pool.decide(100, num_running=11) == 2, "after an hour, fewer are tried"


def test_a_target_that_does_not_answer_once_does_not_hide_late_requests() -> None:
    policy = scaler()

    def decide(step: int, *late: int | None) -> int:
        loads = [None if one is None else Load(num_running=16, num_limited=10 * one, num_late=one) for one in late]
        return policy.decide(members("target", loads), (), 20.0 * step)[0].settled

    assert [decide(step, step, None if step == 2 else step) for step in range(4)][-1] == 3


def test_draft_workers_are_added_while_each_brings_what_it_costs() -> None:
    # 2.0 times plain with 1 sequence a worker, 1.9 with 2, 1.7 with 4, nothing from 8 on.
    served = demand(8, 2.0, 1.9, 1.7, 1.0)
    assert wanted_drafts([served], 1) == 4  # 1.9: from there on each of four more brings 0.025
    assert wanted_drafts([served], 1, "ray.scaling.draft_gain=0.01") == 8
    assert wanted_drafts([served], 1, "ray.scaling.draft_gain=0.3") == 2


def test_targets_count_together() -> None:
    one = demand(4, 2.0, 1.5, 1.0)
    assert wanted_drafts([one], 1) == 4
    assert wanted_drafts([one, one], 1) == 8


def test_a_worker_that_brings_nothing_more_goes() -> None:
    assert wanted_drafts([demand(4, 1.6)], 3) == 1
    assert wanted_drafts([demand(4, 1.6)], 8) == 4  # and so on
    assert wanted_drafts([demand(8, 1.6, 1.6, 1.5, 1.2)], 8) == 4


def test_a_pool_that_no_target_profits_from_shrinks_to_its_minimum() -> None:
    useless = demand(16, 1.01, 0.8)
    assert wanted_drafts([useless, useless], 3) == 1
    assert wanted_drafts([useless, useless], 1, "ray.draft.min_replicas=0") == 0
    assert wanted_drafts([demand(0, 2.0)], 4, "ray.draft.min_replicas=0") == 0


def test_it_comes_back_from_none_when_it_pays_again() -> None:
    assert wanted_drafts([demand(4, 1.6)], 0, "ray.draft.min_replicas=0") == 1
    assert wanted_drafts([demand(4, 1.02)], 0, "ray.draft.min_replicas=0") == 0


def test_what_was_not_measured_changes_nothing() -> None:
    assert wanted_drafts([None, None], 3) == 3
    assert not scaler().decide(members("target", [None]), (), 0.0)


def test_a_pool_of_none_is_tried_when_nobody_has_measured_it() -> None:
    none = ("ray.draft.min_replicas=0", "ray.scaling.mode=advise")
    busy, idle = (members("target", [Load(num_running=number)]) for number in (1, 0))
    assert [scaler(*none).decide(targets, (), 0.0)[1].settled for targets in (busy, idle)] == [1, 0]


def test_workers_without_room_for_all_are_joined_by_others() -> None:
    paying = demand(32, 1.6)
    assert wanted_drafts([paying], 1) == 1
    assert wanted_drafts([paying], 1, "draft.max_num_seqs=8") == 4
    assert wanted_drafts([paying], 1, kv_use=0.8) == 3  # 8 sequences fill 0.8 of its blocks: 30 of the 32 have room


def test_a_small_change_of_the_measures_changes_nothing() -> None:
    """A worker is added for `draft_gain`, and goes when it brings less than half of that."""
    for gain, before, after in ((1.5, 1, 1), (1.53, 1, 1), (1.53, 2, 2), (1.56, 1, 2), (1.52, 2, 1)):
        assert wanted_drafts([demand(2, gain, 1.5)], before) == after, (gain, before)


def decisions(policy: Scaler, seconds: Sequence[float], num_running: int, num_targets: int) -> list[Decision]:
    loads = [Load(num_running=num_running)] * num_targets
    return [policy.decide(members("target", loads), (), now)[0] for now in seconds]


def test_a_change_must_be_wanted_for_as_long_as_its_delay() -> None:
    policy = scaler("ray.scaling.upscale_delay_seconds=10", "ray.scaling.downscale_delay_seconds=60")
    assert [d.settled for d in decisions(policy, (0, 5, 9.9, 10), 32, 1)] == [1, 1, 1, 2]
    assert [d.settled for d in decisions(policy, (11, 70), 2, 2)] == [2, 2]
    assert [d.settled for d in decisions(policy, (71,), 20, 2)] == [2]  # it was wanted otherwise for a moment
    assert [d.settled for d in decisions(policy, (72, 131, 132), 2, 2)] == [2, 2, 1]


def test_it_goes_on_from_where_a_smaller_change_has_led() -> None:
    policy = scaler("ray.scaling.downscale_delay_seconds=10")
    assert [d.settled for d in decisions(policy, (0,), 24, 3)] == [3]
    assert [d.settled for d in decisions(policy, (1, 6, 11), 12, 3)] == [3, 3, 2]
    assert [d.settled for d in decisions(policy, (12, 21, 22), 2, 2)] == [2, 2, 1]


def test_a_peak_within_the_delay_does_not_count() -> None:
    policy = scaler("ray.scaling.upscale_delay_seconds=10")
    for now, waiting in ((0, 0), (5, 10**6), (10, 0)):
        load = Load(num_running=32, num_waiting_tokens=waiting)
        (decision, *_) = policy.decide(members("target", [load]), (), float(now))
    assert decision.settled == 2


def test_what_was_wanted_before_the_delay_counts_no_more() -> None:
    """Such as while the workers that were asked for are loading, or where only advice is asked for."""
    policy = scaler("ray.scaling.mode=advise", "ray.scaling.upscale_delay_seconds=10")
    assert [d.settled for d in decisions(policy, (0, 10), 32, 1)] == [1, 2]
    assert [decisions(policy, (now,), 96, 1)[0].settled for now in (11, 20, 21)] == [2, 2, 4]


def test_workers_that_were_asked_for_count_before_they_are_there() -> None:
    policy = scaler("target.replicas=4", "ray.scaling.downscale_delay_seconds=60")
    assert [d.settled for d in decisions(policy, (0, 30, 59), 32, 1)] == [4, 4, 4]  # as deployed
    policy.asked("target", 6)
    assert [d.settled for d in decisions(policy, (60, 61), 32, 1)] == [2, 2]
    policy.asked("target", 2)
    assert [d.settled for d in decisions(policy, (62, 63), 32, 1)] == [2, 2]


def test_a_decision_says_what_it_rests_on() -> None:
    loads = [Load(num_running=16, num_waiting_tokens=100, demand=demand(16, 2.0, 1.5, 1.2, 1.0))]
    target, draft = scaler().decide(members("target", loads), members("draft", [Load()]), 0.0)
    assert target.inputs == {"use": 0.5, "queued_tokens": 100.0, "late": 0.0}
    assert "50% full, 100 tokens waiting" in target.reason
    assert draft.inputs["sequences"] == 16
    assert draft.inputs["rate"] == 1.0
    assert draft.inputs["wanted_rate"] > 1.0
    assert "16 sequences of 1 targets" in draft.reason


def test_there_is_no_draft_pool_to_scale_beside_sidecars() -> None:
    policy = scaler("draft.placement=sidecar")
    assert [decision.pool for decision in policy.decide(members("target", [Load()]), (), 0.0)] == ["target"]
