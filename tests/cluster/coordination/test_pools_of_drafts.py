"""Pools whose draft workers differ, by model and by place: a simulated cluster in virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from cluster.config import Config
from cluster.config.file import load_config
from cluster.simulated_engines.tokens import token_at
from cluster.simulator.drafts import SimulatedDraft
from cluster.simulator.virtual import VirtualCluster
from cluster.speculation.noise import NoiseKey
from cluster.targets.base import GenerationOutput
from tests.cluster.coordination.test_speculation_gain import GAIN, GOODPUT
from tests.soak import length, only_in_soak

NEAR, FAR = 0.0005, 0.015  # seconds
FOREVER = 50_000


def config(*settings: str) -> Config:
    fixed = ("target.engine=simulated", "draft.drafter=simulated", "target.max_model_len=100000")
    return load_config(None, [*fixed, "target.max_num_batched_tokens=2048", *settings])


def draft(acceptance: float, name: str = "draft", way: float = NEAR, expected: float | None = None) -> SimulatedDraft:
    return SimulatedDraft(config(f"simulation.acceptance={acceptance}").simulation, name, way, expected)


def cluster(
    *drafts: SimulatedDraft, streams: int = 4, trial_share: float = 0.02, settings: Sequence[str] = ()
) -> VirtualCluster:
    running = VirtualCluster(config(f"placement.trial_share={trial_share}", *settings), drafts)
    for _ in range(streams):
        running.submit(FOREVER)
    return running


PLAIN_RATE = 154.0  # tokens a second of four streams without drafts


def loads(running: VirtualCluster) -> list[int]:
    """Sequences on each draft worker, by `VirtualPool.drafts`."""
    return [draft.worker.num_sequences for draft in running.pool.drafts]


class TestModels:
    def test_the_better_draft_gets_the_traffic(self) -> None:
        running = cluster(draft(0.5, "worse"), draft(0.9, "better"), trial_share=0.0)
        running.run(10.0)
        assert loads(running) == [0, 4]
        alone = cluster(draft(0.9))
        alone.run(10.0)
        seconds = length(8.0, 20.0)
        assert running.run(seconds) == pytest.approx(alone.run(seconds), rel=0.05)

    @only_in_soak
    def test_what_each_would_give_is_told_apart(self) -> None:
        running = cluster(draft(0.5, "worse"), draft(0.9, "better"), trial_share=0.1)
        running.run(length(60.0, 120.0))  # after 40 s the acceptance of the worse one goes by some dozen rounds
        goodputs = running.readings(GOODPUT)
        assert goodputs["better",] == pytest.approx(1.51, rel=0.15)  # 0.9 alone: 233 tokens/s of 154; 1.39 predicted
        assert goodputs["worse",] == pytest.approx(1.0, rel=0.15)  # alone 154

    @only_in_soak
    def test_of_both_while_nothing_is_speculated_on(self) -> None:
        running = cluster(draft(0.6, "better"), draft(0.3, "worse"), streams=32)
        running.run(120.0)  # nobody drafts but on trial: it takes a while to learn from that
        assert set(running.readings(GAIN).values()) == {1.0}
        goodputs = running.readings(GOODPUT)
        assert goodputs["better",] == pytest.approx(0.87, rel=0.1)  # as with a forced k
        assert 0.64 < goodputs["worse",] < 0.85  # 0.71, but nothing is known of what a round of it would really take

    def test_no_token_changes(self) -> None:
        running = VirtualCluster(config("placement.trial_share=0.5"), [draft(0.5, "worse"), draft(0.9, "better")])
        tokens: dict[str, list[int]] = {}

        def take(outputs: list[GenerationOutput]) -> None:
            for output in outputs:
                tokens.setdefault(output.request_id, []).extend(output.token_ids)

        running.on_step = take
        for _ in range(40):
            running.submit(60)
        running.run(60.0)
        assert len(tokens) == 40
        for name, own in tokens.items():
            key = NoiseKey.derive(int(name), 0)
            assert own == [token_at(key, 8 + place, 1000) for place in range(60)]


class TestVersions:
    """Three workers, and a new version of the draft on one of them, where drafts pay."""

    STEPS = "simulation.target_step_ms=[[1, 30], [16, 33], [64, 40], [128, 60], [512, 200]]"
    STREAMS, MAX_TOKENS = 12, 100

    def serving(self, first_seed: int = 0) -> VirtualCluster:
        running = VirtualCluster(config(self.STEPS), [draft(0.8, "old")] * 3, seeds=itertools.count(first_seed))

        def replace_ended(outputs: Sequence[GenerationOutput]) -> None:
            for output in outputs:
                if output.finish_reason is not None:
                    running.submit(self.MAX_TOKENS)

        running.on_step = replace_ended
        for _ in range(self.STREAMS):
            running.submit(self.MAX_TOKENS)
        running.run(4.0)
        return running

    def load(self, running: VirtualCluster, acceptance: float) -> None:
        changed = running.pool.drafts[-1]
        changed.wanted = draft(acceptance, "new")
        changed.kill()
        running.run(0.5)
        changed.start()

    def test_a_bad_one_never_gets_more_than_one_sequence(self) -> None:
        running = self.serving()
        self.load(running, 0.2)
        until = running.time.now() + length(2.5, 20.0)
        most = 0
        while running.time.now() < until:
            running.step()
            most = max(most, loads(running)[-1])
        assert most == 1

    def test_a_good_one_gets_its_share_within_seconds(self) -> None:
        running = self.serving()
        self.load(running, 0.8)
        until = running.time.now() + 20.0
        while loads(running)[-1] < 3:
            assert running.time.now() < until
            running.run(0.5)

    @only_in_soak
    @pytest.mark.parametrize("acceptance", [0.0, 0.3])
    def test_a_bad_one_costs_few_tokens(self, acceptance: float) -> None:
        num_tokens = [0, 0]
        for seed in range(4):
            for index, loads_it in enumerate((False, True)):
                running = self.serving(seed * 10_000)
                if loads_it:
                    self.load(running, acceptance)
                before = running.num_tokens
                running.run(5.0)
                num_tokens[index] += running.num_tokens - before
        assert num_tokens[1] > 0.95 * num_tokens[0]


class TestPlaces:
    """Two hosts in each of two zones, without run-ahead, which hides how far they are."""

    def pool(self, *, labels_are_right: bool = True) -> VirtualCluster:
        said_near, said_far = (NEAR, 0.005) if labels_are_right else (0.005, NEAR)
        near, far = draft(0.8, way=NEAR, expected=said_near), draft(0.8, way=FAR, expected=said_far)
        return cluster(near, near, far, far, settings=["speculation.max_run_ahead=0"])

    def test_the_far_ones_are_hardly_slower_where_they_run_ahead(self) -> None:
        rates = []
        for way in (NEAR, FAR):
            running = cluster(draft(0.8, way=way))
            running.run(10.0)
            rates.append(running.run(length(10.0, 30.0)))
        assert rates[1] > 0.93 * rates[0] > 1.2 * PLAIN_RATE

    @pytest.mark.parametrize("labels_are_right", length([False], [True, False]))
    def test_the_near_ones_draft(self, *, labels_are_right: bool) -> None:
        running = self.pool(labels_are_right=labels_are_right)
        running.run(10.0)
        assert sum(loads(running)[:2]) == 4

    def test_when_they_die_the_far_ones_do_and_when_they_are_back_they_do_again_and_stay(self) -> None:
        running = self.pool()
        running.run(10.0)
        for near in running.pool.drafts[:2]:
            near.kill()
        running.run(2.0)
        assert running.run(8.0) > 1.02 * PLAIN_RATE  # a little is to be had of the far ones, too
        assert loads(running) == [0, 0, 2, 2]
        for near in running.pool.drafts[:2]:
            near.start()
        running.run(5.0)
        assert sum(loads(running)[:2]) == 4
        (moves,) = running.readings("outrider_sequences_moved").values()
        running.run(60.0)
        assert running.readings("outrider_sequences_moved") == {(): moves}  # no flapping
