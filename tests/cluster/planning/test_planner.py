"""Plans: throughput, dollars, memory and how many targets requests take."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cluster.engine.memory_plan import PlannedModel
from cluster.errors import ConfigurationError
from cluster.planning.hardware import parse_gpus
from cluster.planning.latency import LatencyLimits
from cluster.planning.options import ClusterRequest, options
from cluster.planning.prediction import ExpectedLoad, Option, Plan, dollars_per_million_tokens, most_sequences, plan
from cluster.planning.round_costs import RUN_AHEAD_HIDES, Drafting
from cluster.planning.steps import MeasuredSteps

_TARGET = MeasuredSteps(((1, 0.020), (100, 0.020), (200, 0.060)))
_ALONE = Option("alone", _TARGET, target_dollars_per_hour=12.0)
_DRAFTED = replace(_ALONE, drafting=Drafting(MeasuredSteps(((1, 0.001),)), 0.8))


def request(draft: str = "1B", **changes: object) -> ClusterRequest:
    reference = ClusterRequest(
        target=PlannedModel.parse("70B"),
        target_gpus=parse_gpus("4xA100-80"),
        drafts=tuple(map(PlannedModel.parse, draft.split(","))),
        draft_gpus=parse_gpus("A10G"),
        acceptance=0.8,
        round_trips_seconds=(0.0005, 0.010),
        sidecar_round_trip_seconds=0.0002,
    )
    return replace(reference, **changes)  # type: ignore[arg-type]


def planned(draft: str = "1B", load: ExpectedLoad | None = None, **changes: object) -> dict[str, Plan]:
    return {o.name: plan(o, load or ExpectedLoad(16, 128, 64)) for o in options(request(draft, **changes))}


def test_drafts_are_compared_side_by_side() -> None:
    both, alone = planned("7B,1B"), planned("1B")
    assert both["1B, sidecar"] == replace(alone["sidecar"], option="1B, sidecar")
    assert {"7B, sidecar", "1B, sidecar, INT4 draft", "EAGLE head in the target", "n-gram"} <= both.keys()
    one_pass, levels = alone["pool, 0.5 ms away, one pass"].round, alone["pool, 0.5 ms away"].round
    assert one_pass.draft_seconds < levels.draft_seconds / levels.num_speculative_tokens * 2


def test_a_head_reads_a_layer_a_projection_and_the_output_head() -> None:
    head = next(option for option in options(request()) if option.name == "EAGLE head in the target")
    # Llama 70B: 0.85 G in a layer, 8,192 x 16,384 in the projection, 128,256 x 8,192 in the output head: 2.0 G in all
    (budget,) = head.budgets
    draft = budget.tenants[1].model
    assert draft.num_parameters == pytest.approx(2.0e9, rel=0.03)
    assert draft.num_layers == 1


def test_one_sequence_alone() -> None:
    # a prompt of 100 tokens: 20 + 0.4 ms; then 63 steps of 20 ms; each with 0.271 ms of the program:
    # 64 / (0.02067 + 63 * 0.020271) = 49.32
    # 12 dollars / 3,600 s / 49.32 = 67.6 dollars a million
    own = plan(_ALONE, ExpectedLoad(1, 100, 64))
    assert own.tokens_per_second == pytest.approx(49.32, rel=1e-3)
    assert own.dollars_per_million_tokens == pytest.approx(67.59, rel=1e-3)


def test_dollars_of_the_published_cluster() -> None:
    # 12 dollars an hour, 5,120 tokens/s: 12 / 3,600 / 5,120 * 1e6 = 0.651
    assert dollars_per_million_tokens(12, 5120) == pytest.approx(0.651, rel=1e-3)


def test_the_depth_with_the_most_tokens_is_taken() -> None:
    best = plan(_DRAFTED, ExpectedLoad(1, 10, 64))
    others = [plan(replace(_DRAFTED, num_speculative_tokens=k), ExpectedLoad(1, 10, 64)) for k in range(17)]
    assert best.tokens_per_second == max(other.tokens_per_second for other in others)
    assert best.round.num_speculative_tokens == others.index(max(others, key=lambda o: o.tokens_per_second))


def test_where_drafts_are_never_right_nothing_is_drafted() -> None:
    wrong = replace(_DRAFTED, drafting=Drafting(MeasuredSteps(((1, 0.001),)), 0.0))
    assert plan(wrong, ExpectedLoad(4, 10, 64)).round.num_speculative_tokens == 0


def test_prompts_cost_those_that_run_meanwhile() -> None:
    short, long = (plan(_ALONE, ExpectedLoad(8, prompt, 64)) for prompt in (10, 400))
    assert long.tokens_per_second < short.tokens_per_second
    assert long.latency.between_tokens > short.latency.between_tokens


def test_requests_take_as_many_targets_as_they_need() -> None:
    own = plan(_ALONE, ExpectedLoad(8, 100, 64, requests_per_second=10.0))
    # a target of 8 sequences: less than 8 / (63 * 20 ms) = 6.3 answers a second
    assert own.num_targets == 2
    assert own.dollars_per_hour == 24.0
    assert own.tokens_per_second * own.num_targets * own.utilization == pytest.approx(640)


def test_the_most_sequences_within_a_limit() -> None:
    load = ExpectedLoad(1, 100, 64)
    most = most_sequences(_ALONE, load, LatencyLimits(1.0, 0.030), 64)
    inside, outside = (plan(_ALONE, replace(load, num_seqs=n)).latency for n in (most, most + 1))
    assert inside.between_tokens_p99 <= 0.030 < outside.between_tokens_p99
    assert most_sequences(_ALONE, load, LatencyLimits(1.0, 0.010), 64) == 0


def test_draft_devices_of_a_pool_and_of_a_sidecar() -> None:
    plans = planned(load=ExpectedLoad(8, 128, 64))
    near = plans["pool, 0.5 ms away"]
    assert plans["sidecar"].draft_devices_per_target == 1
    assert near.draft_devices_per_target == 1 / int(near.round.targets_fed)
    assert plans["draft on the target's GPUs"].draft_devices_per_target == 0
    # 12 dollars, and half a draft GPU of one
    assert near.dollars_per_hour == pytest.approx(12 + near.draft_devices_per_target)


def test_targets_share_what_a_draft_device_hides() -> None:
    plans = planned(load=ExpectedLoad(8, 128, 64), num_speculative_tokens=4)
    assert plans["sidecar"].round.hidden_share == RUN_AHEAD_HIDES
    near = plans["pool, 0.5 ms away"]
    assert near.round.hidden_share == pytest.approx(RUN_AHEAD_HIDES * near.draft_devices_per_target)
    assert plans["draft on the target's GPUs"].round.hidden_share == 0


def test_memory_decides_what_fits_and_how_many_draft_gpus_it_takes() -> None:
    # 7B in FP16 leaves 10 GB of an A10G. 9 GB of these are KV: 17,166 tokens of 524 kB. A sequence takes 192 tokens and
    # a window of 2k + 2 = 6, so 198. That makes 86 sequences, so 128 take two GPUs.
    plans = planned("7B", load=ExpectedLoad(128, 128, 64), num_speculative_tokens=2)
    assert plans["sidecar"].draft_devices_per_target == 2
    small = planned("7B", load=ExpectedLoad(16, 128, 64), target_gpus=parse_gpus("1xA100-80"))
    assert not any(own.fits for own in small.values())


def test_the_far_pool_is_slower_than_the_near_one() -> None:
    plans = planned(num_speculative_tokens=3, load=ExpectedLoad(4, 128, 64))
    assert plans["pool, 10 ms away"].tokens_per_second < plans["pool, 0.5 ms away"].tokens_per_second


def test_an_int4_draft_is_read_faster_and_accepted_less() -> None:
    plans = planned(num_speculative_tokens=3, load=ExpectedLoad(4, 128, 64))
    sidecar, int4 = plans["sidecar"].round, plans["sidecar, INT4 draft"].round
    assert int4.draft_seconds < sidecar.draft_seconds
    # 0.8 * 0.724 / 0.78 = 0.7426: 1 + 0.7426 + 0.5514 + 0.4095 = 2.7035
    assert int4.num_tokens == pytest.approx(2.7035, rel=1e-3)


def test_a_small_draft_on_the_targets_host_pays_and_costs_nothing() -> None:
    plans = planned("0.5B", load=ExpectedLoad(4, 128, 64))
    alone, own = plans["no speculation"], plans["host-cpu, INT8 draft"]
    assert own.round.num_speculative_tokens > 0
    assert own.tokens_per_second > 1.5 * alone.tokens_per_second
    assert own.draft_devices_per_target == 0
    assert own.dollars_per_hour == alone.dollars_per_hour
    assert own.round.round_trip_seconds == 0.0002
    # 0.5e9 + 151,936 * 896 bytes at 0.8 * 208 GB/s and 0.3 ms: 4.1 ms a draft token, and little KV
    assert own.round.draft_seconds / own.round.num_speculative_tokens == pytest.approx(4.1e-3, rel=0.03)


def test_a_large_draft_on_the_targets_host_does_not_pay() -> None:
    # 7e9 bytes at 166 GB/s: 42 ms a draft token, where a step without drafts takes 24
    own = planned("7B", load=ExpectedLoad(16, 128, 64))["host-cpu, INT8 draft"]
    assert own.round.num_speculative_tokens == 0


def test_a_better_host_drafts_faster_and_a_full_memory_is_seen() -> None:
    wide, small = (
        planned("0.5B", num_speculative_tokens=3, host_cpu=parse_gpus(cpu))["host-cpu, INT8 draft"]
        for cpu in ("64:416:44:0", "0.4:208:22:0")
    )
    known = planned("0.5B", num_speculative_tokens=3)["host-cpu, INT8 draft"]
    assert wide.round.draft_seconds < known.round.draft_seconds
    assert (known.fits, small.fits) == (True, False)


def test_bad_input_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"between 0 and 1, not 1\.2"):
        request(acceptance=1.2)
    with pytest.raises(
        ConfigurationError, match="a step of 8 tokens has no room for prompts in addition to 8 sequences"
    ):
        ExpectedLoad(8, 100, 64, max_num_batched_tokens=8)


def test_draft_devices_are_as_many_as_what_runs_needs() -> None:
    """Few sequences run where few requests come, however many could."""
    at_most = ExpectedLoad(400, 4096, 64, max_num_batched_tokens=8192, requests_per_second=0.5)
    found = planned("7B", at_most, num_speculative_tokens=3)["sidecar, INT4 draft"]
    assert found.draft_devices_per_target == math.ceil(found.num_seqs / 8)  # for which each has room
    assert found.num_seqs < 100


def test_an_int4_draft_that_is_never_accepted_is_taken_at_its_word() -> None:
    never = {o.name: o for o in options(request(int4_acceptance=0.0))}
    rates = {name: o.drafting.acceptance for name, o in never.items() if o.drafting and "INT4" in name}
    assert set(rates.values()) == {0.0}


def test_cached_tokens_of_a_prompt_cost_nothing_but_their_kv() -> None:
    load = ExpectedLoad(8, 400, 64)
    whole, cached = (plan(_ALONE, one) for one in (load, replace(load, cached_tokens=300)))
    assert cached.tokens_per_second > whole.tokens_per_second
    with pytest.raises(ConfigurationError, match="400 cached tokens of a prompt of 400"):
        replace(load, cached_tokens=400)


def test_long_prompts_are_read_in_parts() -> None:
    # 1,000 rows add 360 ms to a step of 20 ms: 8 parts of at most 50 ms
    load = ExpectedLoad(2, 1000, 64)
    whole, parts = (plan(_ALONE, replace(load, max_prefill_seconds=most)).latency for most in (None, 0.05))
    assert whole.pause_p99 > 0.3
    assert parts.pause_p99 < 0.08


def test_within_limits_another_depth_may_be_taken() -> None:
    # a verify step of over 100 rows takes longer, so that answers are faster on average and slower at p99
    load, limits = ExpectedLoad(24, 10, 200), LatencyLimits(math.inf, 0.0165)
    free, limited = plan(_DRAFTED, load), plan(_DRAFTED, load, limits=limits)
    assert limits.admit(limited.latency)
    assert limited.tokens_per_second <= free.tokens_per_second
