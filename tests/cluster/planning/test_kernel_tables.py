from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.engine.memory_plan import PlannedModel
from cluster.planning.hardware import parse_gpus
from cluster.planning.kernel_tables import TabledSteps, interpolate, step_predictor
from cluster.planning.kernels import Segments
from cluster.planning.steps import ASSUMED, Roofline

_70B = PlannedModel.parse("70B")


def test_powers_are_interpolated_exactly_and_large_sizes_grow() -> None:
    table = {1: {1: 1.0, 100: 10.0}, 4: {1: 2.0, 100: 20.0}}
    assert interpolate(table, 4, 100) == 20.0
    assert interpolate(table, 2, 10) == pytest.approx((2 * 10) ** 0.5)
    assert interpolate(table, 0.5, 0.5) == 1.0
    assert interpolate(table, 8, 200) == pytest.approx(80.0)


def test_missing_points_count_as_their_neighbours() -> None:
    assert interpolate({1: {1: 1.0, 10: 5.0}, 4: {1: 4.0}}, 4, 10) == pytest.approx(40.0)


def test_steps_of_vllm_are_near_what_was_measured() -> None:
    """Decode steps of `bench/results/gpu-vllm.json`, without speculation."""
    from bench.roofline import measured_models

    steps = step_predictor(measured_models()["target"], parse_gpus("H100"))
    assert steps.source == "4.2B on H100: kernels as AIConfigurator measured them for vLLM; attention by formula"
    for num_seqs, milliseconds in ((1, 3.38), (4, 3.72), (16, 3.88)):
        assert 1e3 * steps.seconds((Segments(num_seqs, 1, 200),)) == pytest.approx(milliseconds, rel=0.1)


@pytest.mark.parametrize("gpus", ["4xA100-80", "2xH100", "8xH200"])
def test_more_work_takes_longer(gpus: str) -> None:
    steps = TabledSteps.of(_70B, parse_gpus(gpus), ASSUMED)
    assert steps is not None
    assert steps.decoding
    assert steps.prompts
    times = [
        steps.seconds(step)
        for step in (
            (Segments(32, 1, 500),),
            (Segments(32, 1, 4000),),
            (Segments(32, 8, 4000),),
            (Segments(32, 8, 4000), Segments(1, 1000, 0, sampled_rows=1)),
            (Segments(32, 8, 4000), Segments(1, 2000, 0, sampled_rows=1)),
        )
    ]
    assert times == sorted(times)


def test_the_end_of_a_prompt_takes_what_its_beginning_does_not() -> None:
    steps = TabledSteps.of(_70B, parse_gpus("4xH100"), ASSUMED)
    assert steps is not None
    whole, first, second = (
        steps._attention((Segments(1, rows, before, sampled_rows=1),))
        for rows, before in ((2000, 0), (1500, 0), (500, 1500))
    )
    assert whole == pytest.approx(first + second)


@pytest.mark.parametrize(("model", "gpus"), [("70B", "4xA10G"), ("70B:int4", "4xH100"), ("70B", "3xH100")])
def test_what_has_no_tables_is_by_formula(model: str, gpus: str) -> None:
    steps = step_predictor(PlannedModel.parse(model), parse_gpus(gpus))
    assert isinstance(steps, Roofline)
    assert not steps.source


def test_an_efficiency_of_the_user_counts() -> None:
    steps = step_predictor(_70B, parse_gpus("4xH100"), replace(ASSUMED, bandwidth=0.9))
    assert isinstance(steps, Roofline)
