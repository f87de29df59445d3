"""Step times against arithmetic by hand."""

from __future__ import annotations

import pytest

from cluster.engine.memory_plan import PlannedModel
from cluster.planning.hardware import parse_gpus
from cluster.planning.steps import IDEAL, Efficiency, MeasuredSteps, Roofline

_7B, _70B = PlannedModel.parse("7B"), PlannedModel.parse("70B")


def test_a_7b_draft_on_an_a10g_reads_its_weights_for_23_ms() -> None:
    # 7e9 * 2 bytes / 600e9 bytes/s = 23.33 ms; computing one row: 2 * 7e9 / 70e12 = 0.2 ms
    assert Roofline(_7B, parse_gpus("A10G"), IDEAL).seconds(1, 0) == pytest.approx(0.023333, rel=1e-4)


def test_kv_is_read_beside_the_weights() -> None:
    # KV of a token: 2 * 80 layers * 8 heads * 128 * 2 bytes = 327,680; of 16 sequences of 1,000 tokens: 5.24 GB
    # (140 + 5.24) e9 / (4 * 2,039e9) = 17.81 ms
    assert Roofline(_70B, parse_gpus("4xA100-80"), IDEAL).seconds(16, 16_000) == pytest.approx(0.017808, rel=1e-4)


def test_many_rows_are_bound_by_computing() -> None:
    # 2 * 70e9 * 384 rows / (4 * 312e12) = 43.08 ms, more than 17.17 ms of reading
    assert Roofline(_70B, parse_gpus("4xA100-80"), IDEAL).seconds(384, 0) == pytest.approx(0.043077, rel=1e-4)


def test_what_is_not_had_of_a_data_sheet_takes_longer() -> None:
    efficiency = Efficiency(bandwidth=0.8, compute=0.5, all_reduce_seconds=10e-6, step_seconds=0.3e-3)
    # 17.165 ms / 0.8 = 21.457 ms; 2 * 80 layers * 10 us = 1.6 ms; 0.3 ms
    assert Roofline(_70B, parse_gpus("4xA100-80"), efficiency).seconds(1, 0) == pytest.approx(0.023357, rel=1e-4)
    # on one GPU nothing is reduced: 23.333 / 0.8 + 0.3
    assert Roofline(_7B, parse_gpus("A10G"), efficiency).seconds(1, 0) == pytest.approx(0.029467, rel=1e-4)


def test_measured_steps_are_linear_between_what_was_measured() -> None:
    steps = MeasuredSteps(((1, 0.010), (5, 0.018)))
    # halfway: 14 ms; beyond 5 rows along the last slope of 2 ms a row
    assert steps.seconds(3, 1e6) == pytest.approx(0.014)
    assert steps.seconds(7, 0) == pytest.approx(0.022)
