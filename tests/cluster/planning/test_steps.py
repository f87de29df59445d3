"""Step times against arithmetic by hand."""

from __future__ import annotations

import pytest

from cluster.engine.memory_plan import PlannedModel
from cluster.planning.hardware import parse_gpus
from cluster.planning.kernels import Segments
from cluster.planning.steps import ASSUMED, Efficiency, MeasuredSteps, Roofline, curve_points
from tests.cluster.planning.ideal import IDEAL

_7B, _70B = PlannedModel.parse("7B"), PlannedModel.parse("70B")
_ONE_ROW = (Segments(1, 1, 0),)


def test_a_7b_draft_on_an_a10g_reads_its_weights_for_23_ms() -> None:
    # 7e9 * 2 bytes / 600e9 bytes/s = 23.33 ms; computing one row: 2 * 7e9 / 70e12 = 0.2 ms
    assert Roofline(_7B, parse_gpus("A10G"), IDEAL).seconds(_ONE_ROW) == pytest.approx(0.023333, rel=1e-4)


def test_kv_is_read_after_the_weights() -> None:
    # KV of a token: 2 * 80 layers * 8 heads * 128 * 2 bytes = 327,680; of 16 sequences of 1,001 tokens: 5.248 GB
    # (140 + 5.248) e9 / (4 * 2,039e9) = 17.809 ms, and logits of 16 * 128,256 * 4 bytes on one GPU 0.004 ms
    parts = Roofline(_70B, parse_gpus("4xA100-80"), IDEAL).parts((Segments(16, 1, 1000),))
    assert parts["weights"] == pytest.approx(0.017165, rel=1e-4)
    assert parts["KV"] == pytest.approx(0.000643, rel=1e-3)
    assert parts["logits"] == pytest.approx(4.026e-6, rel=1e-3)
    assert sum(parts.values()) == pytest.approx(0.017812, rel=1e-4)


def test_many_rows_are_bound_by_computing() -> None:
    # 2 * 70e9 * 384 rows / (4 * 312e12) = 43.08 ms, more than 17.17 ms of reading
    parts = Roofline(_70B, parse_gpus("4xA100-80"), IDEAL).parts((Segments(384, 1, 0),))
    assert parts["arithmetic"] == pytest.approx(0.043077, rel=1e-4)
    assert parts["weights"] == 0.0


def test_attention_is_added_to_products_that_are_bound_by_computing() -> None:
    # one kernel after the other: KV of 384 sequences of 1,001 tokens is 126 GB, 15.44 ms in addition to the 43.08
    parts = Roofline(_70B, parse_gpus("4xA100-80"), IDEAL).parts((Segments(384, 1, 1000),))
    assert parts["arithmetic"] + parts["KV"] == pytest.approx(0.043077 + 0.015443, rel=1e-4)


@pytest.mark.parametrize("efficiency", [IDEAL, ASSUMED])
def test_no_step_is_shorter_for_more_to_do(efficiency: Efficiency) -> None:
    steps = Roofline(_70B, parse_gpus("4xH100"), efficiency)
    numbers = (1, 2, 4, 8, 16, 32, 64, 256)
    for fixed in (1, 64):
        for made in (
            [(Segments(n, fixed, 500),) for n in numbers],
            [(Segments(fixed, n, 500),) for n in numbers],
            [(Segments(fixed, 4, 10 * n),) for n in numbers],
        ):
            seconds = [steps.seconds(step) for step in made]
            assert seconds == sorted(seconds)
            assert seconds[0] < seconds[-1]


def test_a_curve_has_the_rows_of_its_sequences() -> None:
    steps = Roofline(_70B, parse_gpus("4xA100-80"))
    (rows, ms), *_ = curve_points(steps, 16, 500.0, [64])
    assert rows == 64
    assert ms == pytest.approx(1e3 * steps.seconds((Segments(16, 4, 500),)))


def test_what_is_not_had_of_a_data_sheet_takes_longer() -> None:
    efficiency = Efficiency(bandwidth=0.8, compute=0.5, all_reduce_seconds=10e-6, step_seconds=0.3e-3)
    # 17.165 ms / 0.8 = 21.457 ms; 2 * 80 layers * 10 us = 1.6 ms; 0.3 ms
    assert Roofline(_70B, parse_gpus("4xA100-80"), efficiency).seconds(_ONE_ROW) == pytest.approx(0.023357, rel=1e-4)
    # on one GPU nothing is reduced: 23.333 / 0.8 + 0.3
    assert Roofline(_7B, parse_gpus("A10G"), efficiency).seconds(_ONE_ROW) == pytest.approx(0.029467, rel=1e-4)


def test_measured_steps_are_linear_between_what_was_measured() -> None:
    steps = MeasuredSteps(((1, 0.010), (5, 0.018)))
    # halfway: 14 ms; beyond 5 rows along the last slope of 2 ms a row
    assert steps.seconds((Segments(3, 1, 1e6),)) == pytest.approx(0.014)
    assert steps.seconds((Segments(2, 3, 0), Segments(1, 1, 0))) == pytest.approx(0.022)
