"""A cluster in virtual time: what must hold of every run, and arithmetic that can be done by hand."""

from __future__ import annotations

import math

import pytest

from cluster.engine.memory_plan import PlannedModel
from cluster.errors import ConfigurationError
from cluster.planning.hardware import parse_gpus
from cluster.simulated_engines.steps import StepCurve
from cluster.simulator.cluster import MeasuredSpan, SimulatedCluster
from cluster.simulator.hardware import OnGpus, dollars_per_hour, steps_of
from cluster.simulator.traffic import Arrival, ClosedTraffic, EndedRequest, Lengths, OpenTraffic, RecordedTraffic
from tests.cluster.simulator.clusters import ANSWERS, PROMPTS, config_of, figures_of, ran, streams
from tests.soak import length

SLOW_DRAFT = "simulation.draft_step_ms=[[1,10],[16,20]]"
SOME_SECONDS = length(10.0, 60.0)


def test_the_same_seed_gives_the_same_figures() -> None:
    first, again, other = (
        figures_of(6, "target.replicas=2", seconds=length(6.0, 20.0), seed=seed) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("speculation.num_speculative_tokens=0",),
        ("speculation.controller=fixed", SLOW_DRAFT),
        ("target.replicas=3", "draft.replicas=2", SLOW_DRAFT),
        ("target.replicas=2", "draft.placement=sidecar"),
        ("target.replicas=2", "draft.placement=host-cpu"),
        ("simulation.round_trip_ms=120",),
        ("draft.max_num_seqs=2",),
        ("simulation.acceptance=[0.9, 0.5]", "speculation.max_run_ahead=0"),
        ("simulation.acceptance=0",),
        ("simulation.acceptance=1",),
        ("simulation.acceptance_schedule=[[0,0.9],[5,0.1]]",),
        ("speculation.tree_width=3",),
        ("draft.placement=in-process", "target.replicas=2"),
        ("draft.placement=in-process", "draft.in_process_threads=own"),
    ],
    ids=str,
)
def test_every_request_is_answered_whole_and_no_block_is_left_behind(settings: tuple[str, ...]) -> None:
    cluster = ran(OpenTraffic(3.0, length(10.0, 30.0), PROMPTS, ANSWERS, seed=1), *settings)
    figures, recorder = cluster.figures(), cluster.recorder
    assert figures.num_finished == figures.num_requests == len(recorder.answer_tokens) > length(20, 50)
    assert recorder.num_tokens == sum(recorder.answer_tokens)
    assert cluster.num_blocks_in_use == 0
    assert all(
        a <= b <= c for a, b, c in zip(recorder.arrived_at, recorder.first_at, recorder.finished_at, strict=True)
    )


def test_an_interval_that_is_cut_off_is_of_the_time_that_it_has() -> None:
    figures = figures_of(4, seconds=25.0)
    whole, cut = figures.intervals[1].tokens_per_second, figures.intervals[-1].tokens_per_second
    assert figures.intervals[-1].seconds == 20.0
    assert cut == pytest.approx(whole, rel=0.15)


def test_what_workers_did_in_the_warm_up_is_not_in_their_figures() -> None:
    traffic = OpenTraffic(3.0, 5.0, PROMPTS, ANSWERS, seed=1)
    for warm_up, is_over in ((0.0, False), (50.0, True)):
        figures = ran(traffic, span=MeasuredSpan(warm_up, 60.0)).figures()
        for worker in (*figures.targets, *figures.drafts):
            assert (worker.utilization == 0.0) is is_over, worker.name


def test_what_does_not_fit_in_memory_waits_or_is_preempted_and_is_answered() -> None:
    traffic = OpenTraffic(6.0, 20.0, PROMPTS, ANSWERS, seed=2)
    cluster = ran(traffic, num_blocks=30)
    figures = cluster.figures()
    assert figures.num_finished == figures.num_requests
    assert cluster.recorder.num_tokens == sum(cluster.recorder.answer_tokens)
    assert figures.targets[0].num_preemptions > 0
    assert 0.9 < figures.targets[0].kv_used <= 1.0
    assert cluster.num_blocks_in_use == 0


def test_too_many_at_once_and_what_never_fits_are_refused() -> None:
    requests = [Arrival(0.0, 20, 20) for _ in range(5)] + [Arrival(9.0, 1000, 1)]
    cluster = ran(RecordedTraffic(requests), "router.max_waiting_requests=3", num_blocks=20)
    assert [cluster.recorder.is_refused[number] for number in range(6)] == [False] * 3 + [True] * 3
    assert cluster.figures().num_finished == 3


class _Heard(RecordedTraffic):
    """Remembers the requests that have ended."""

    def __init__(self, requests: list[Arrival]) -> None:
        super().__init__(requests)
        self.ended: list[EndedRequest] = []

    def after(self, answer: EndedRequest) -> Arrival | None:
        self.ended.append(answer)
        return None


def test_prompts_with_the_same_beginning_share_it_where_they_meet() -> None:
    opening = list(range(64))
    prompts = [[*opening, 1, 2], [*opening, 3], [5, *opening]]
    requests = [Arrival(float(at), len(prompt), 20, prompt) for at, prompt in enumerate(prompts)]
    requests += [Arrival(at, 66, 20) for at in (7.0, 8.0)]  # tokens that no other request shares
    settings = ("target.enable_prefix_caching=true", "target.replicas=2")
    for choose, num_cached in (
        (lambda *_: 0, [0, 64, 0, 0, 0]),
        (lambda arrival, _: int(arrival.seconds) % 2, [0] * 5),
    ):
        traffic = _Heard(requests)
        ran(traffic, *settings, choose=choose)
        assert [one.num_cached_tokens for one in traffic.ended] == num_cached
        assert [len(one.token_ids) for one in traffic.ended] == [20] * 5


def test_without_speculation_it_is_plain_arithmetic() -> None:
    """Alone a sequence takes its prompt's steps and one of a row for every other token."""
    curve = ((1, 10.0), (8, 14.0), (512, 400.0))
    settings = ("speculation.num_speculative_tokens=0", f"simulation.target_step_ms={[list(p) for p in curve]}")
    requests = [Arrival(0.0, 6, 50), Arrival(5.0, 12, 1), Arrival(6.0, 40, 20)]
    cluster = ran(RecordedTraffic(requests), *settings, "target.max_prefill_ms=null", span=MeasuredSpan(0.0, 10.0))
    step = StepCurve(curve).at
    recorder = cluster.recorder
    took = [end - start for start, end in zip(recorder.arrived_at, recorder.finished_at, strict=True)]
    assert took == pytest.approx([step(6) + 49 * step(1), step(12), step(40) + 19 * step(1)], abs=1e-12)
    assert cluster.figures().mean_k == 0.0


def test_a_saturated_cluster_of_twice_the_targets_gives_twice_the_tokens() -> None:
    one = figures_of(32, "target.max_num_seqs=16", "speculation.num_speculative_tokens=0")
    two = figures_of(64, "target.max_num_seqs=16", "speculation.num_speculative_tokens=0", "target.replicas=2")
    assert two.tokens_per_second == pytest.approx(2 * one.tokens_per_second, rel=0.03)


def test_drafts_that_are_always_right_commit_k_and_one_more() -> None:
    figures = figures_of(1, "simulation.acceptance=1", "speculation.controller=fixed", seconds=SOME_SECONDS)
    assert figures.acceptance == pytest.approx(1.0, abs=0.02)  # those beyond an answer's end are not committed
    assert figures.tokens_a_round == pytest.approx(1 + figures.mean_k, abs=0.1)
    assert figures.mean_k > 3.5


def test_acceptance_is_what_was_configured() -> None:
    # What was drafted ahead was right as often as drafts are at the place that it had then.
    fixed = ("speculation.controller=fixed", "speculation.max_run_ahead=0")
    figures = figures_of(4, "simulation.acceptance=[0.8, 0.5]", *fixed, seconds=120.0)
    survival = (0.8, 0.4, 0.2, 0.1)
    assert figures.acceptance == pytest.approx(sum(survival) / 4, rel=0.05)


def test_k_shrinks_where_the_draft_is_shared_and_slow() -> None:
    apart = figures_of(
        8, "target.replicas=2", "draft.replicas=2", "simulation.draft_step_ms=[[1,1],[16,2]]", seconds=SOME_SECONDS
    )
    shared = figures_of(8, "target.replicas=2", SLOW_DRAFT, seconds=SOME_SECONDS)
    assert shared.mean_k < 0.5 * apart.mean_k
    plain = figures_of(8, "target.replicas=2", "speculation.num_speculative_tokens=0", seconds=SOME_SECONDS)
    assert shared.tokens_per_second > 0.95 * plain.tokens_per_second


def test_speculation_comes_back_when_drafts_become_good() -> None:
    traffic = streams(1, 50.0)
    schedule = "simulation.acceptance_schedule=[[0,0.02],[30,0.9]]"
    figures = ran(traffic, schedule, span=MeasuredSpan(0.0, 50.0, is_cut=True)).figures()
    course = [interval.mean_k for interval in figures.intervals]
    assert course[2] < 0.3
    assert course[-1] > 2.0


def test_more_round_trip_makes_rounds_slower() -> None:
    rates = [
        figures_of(1, f"simulation.round_trip_ms={ms}", seconds=SOME_SECONDS).tokens_per_second for ms in (0, 10, 40)
    ]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 1.1 * rates[2]


def test_cost_follows_from_the_price() -> None:
    cluster = ran(streams(4, 10.0), span=MeasuredSpan(2.0, 10.0, is_cut=True))
    figures = cluster.figures(dollars_per_hour=36.0)
    assert figures.dollars_per_million_tokens == pytest.approx(0.01 / figures.tokens_per_second * 1e6)


def test_drafts_cost_what_a_worker_costs_except_on_their_targets_hosts() -> None:
    def dollars(placement: str, of_draft: float | None) -> float | None:
        settings = ("target.replicas=2", "draft.replicas=3", f"draft.placement={placement}")
        return dollars_per_hour(config_of(*settings), 4.0, of_draft)

    assert dollars("pool", 1.0) == 11.0
    assert dollars("sidecar", 1.0) == 14.0
    assert dollars("sidecar", None) is None
    assert dollars("host-cpu", None) == 8.0


def test_a_draft_on_its_targets_host_has_its_head_in_16_bits() -> None:
    draft = OnGpus(PlannedModel.parse("0.5B:int8"), parse_gpus("SPR-16"))

    def draft_step_ms(placement: str) -> float:
        config = steps_of(config_of(f"draft.placement={placement}"), None, draft, mean_context=0)
        return config.simulation.draft_step_ms[0][1]

    # 0.5e9 and 0.636e9 bytes at 0.8 * 208 GB/s, and 0.3 ms
    assert draft_step_ms("sidecar") == pytest.approx(3.3, abs=0.05)
    assert draft_step_ms("host-cpu") == pytest.approx(4.1, abs=0.05)


def test_nobody_asks_and_nothing_happens() -> None:
    figures = ran(ClosedTraffic(1, 1e-6, Lengths(1, 1), Lengths(1, 1), 0), span=MeasuredSpan(1.0, 2.0)).figures()
    assert figures.first_token is None
    assert figures.tokens_per_second == 0.0
    assert not math.isnan(figures.mean_k)


def test_steps_without_room_for_every_sequence_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_num_batched_tokens 8 is less than"):
        SimulatedCluster(config_of("target.max_num_batched_tokens=8"), streams(1, 1.0), 100, MeasuredSpan(0.0, 1.0))


def test_targets_with_draft_workers_of_their_own_run_as_if_alone() -> None:
    """With drafts that are always right a target's course does not depend on which requests it has."""
    settings = ("simulation.acceptance=1", "draft.placement=sidecar")
    times = [0.0, 0.1, 0.4, 0.9, 2.0]  # no answer ends between the arrivals of two targets

    def latencies(num_targets: int) -> list[float]:
        arrivals = [Arrival(at + 0.003 * target, 20, 60) for at in times for target in range(num_targets)]
        recorder = ran(RecordedTraffic(arrivals), *settings, f"target.replicas={num_targets}").recorder
        return [end - start for start, end in zip(recorder.arrived_at, recorder.finished_at, strict=True)]

    alone, together = latencies(1), latencies(2)
    assert together[::2] == pytest.approx(alone, abs=1e-9)
    assert together[1::2] == pytest.approx(alone, abs=1e-9)


def test_trees_gain_where_second_guesses_are_right() -> None:
    settings = ("simulation.acceptance=0.5", "simulation.target_step_ms=[[1,30],[64,40]]")
    chains, trees = (figures_of(2, *settings, f"speculation.tree_width={width}", seconds=10.0) for width in (1, 3))
    assert trees.tokens_a_round > 1.2 * chains.tokens_a_round
    assert trees.tokens_per_second > 1.1 * chains.tokens_per_second


def test_drafts_in_the_target_s_process_save_the_way() -> None:
    far = ("simulation.round_trip_ms=20", "speculation.max_run_ahead=0")  # running ahead hides it
    pool, in_process = (
        figures_of(1, *far, f"draft.placement={place}", seconds=20.0) for place in ("pool", "in-process")
    )
    assert in_process.tokens_per_second > 1.1 * pool.tokens_per_second
    assert in_process.drafts[0].utilization > 0
