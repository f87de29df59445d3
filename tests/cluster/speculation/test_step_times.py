"""Steps are predicted with the prompts that their tokens bring along."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.speculation.step_times import StepTimes

ROWS = (1, 8, 32, 64, 96, 128, 192, 256, 384, 512)


def with_a_knee(knee: int = 96) -> StepTimes:
    """20 ms up to `knee` rows, and 0.2 ms for each beyond."""
    steps = StepTimes(512)
    for rows in ROWS:
        steps.curve.observe(rows, 0.020 + 0.0002 * max(0, rows - knee))
    return steps


def load(prompt_len: int, answer_len: int, steps: StepTimes | None = None, tokens_a_step: int = 40) -> StepTimes:
    steps, rng = steps or with_a_knee(), np.random.default_rng(1)
    for _ in range(400):
        number = int(rng.poisson(tokens_a_step / answer_len))
        for _ in range(number):
            steps.ended()
            steps.joined()
        steps.observe_prompts(number * prompt_len, tokens_a_step)
    return steps


def limit(steps: StepTimes, num_prompt_tokens: int) -> None:
    """Steps leave prompts: they compute no more than `num_prompt_tokens`."""
    for _ in range(200):
        steps.ended()
        steps.joined()
        steps.observe_prompts(num_prompt_tokens, 30, left_some=True)


def seconds(steps: StepTimes, rows: float, tokens: float) -> float:
    return float(steps.seconds(np.array([rows]), np.array([tokens]), 0.0)[0])


def test_without_prompts_a_step_is_its_rows_and_its_wait() -> None:
    steps, rows = with_a_knee(), np.array([1, 48, 200])
    assert steps.seconds(rows, rows * 2.0, 0.003) == pytest.approx(steps.curve.at(rows) + 0.003)


@pytest.mark.parametrize("tokens", [20.0, 48.0, 100.0])
def test_with_prompts_it_is_about_the_mean_over_their_numbers(tokens: float) -> None:
    steps, rng = load(128, 64), np.random.default_rng(2)
    expected = float(steps.curve.at(48 + 128 * rng.poisson(tokens / 64, 20_000)).mean())
    assert seconds(steps, 48, tokens) == pytest.approx(expected, rel=0.2)


def test_prompts_wait_if_answers_bring_more_than_steps_compute() -> None:
    steps = load(128, 64)
    assert not steps.leave_prompts_waiting(100.0)
    limit(steps, 60)  # each answer of 30 tokens brings a prompt of 60
    assert not steps.leave_prompts_waiting(20.0)
    assert steps.leave_prompts_waiting(40.0)
    assert not with_a_knee().leave_prompts_waiting(1e6)


def test_rows_that_are_free_without_prompts_cost_next_to_them() -> None:
    steps = load(128, 64)
    assert seconds(steps, 96, 48.0) > 1.1 * seconds(steps, 48, 48.0)


def test_prompts_that_are_over_are_forgotten() -> None:
    steps = load(128, 64)
    for _ in range(2000):
        steps.observe_prompts(0, 40)
    assert seconds(steps, 48, 40.0) == pytest.approx(steps.curve.seconds(48))
    assert steps.room_for_drafts(12) >= 499


def test_a_load_that_grows_does_not_make_answers_seem_short() -> None:
    """64 prompts of 100 tokens come at once; the first answers end 108 steps later."""
    steps = with_a_knee()
    for _ in range(64):
        steps.joined()
    for _ in range(20):
        steps.observe_prompts(320, 64)
    assert seconds(steps, 64, 64.0) == pytest.approx(steps.curve.seconds(64))
    assert steps.room_for_drafts(12) == 250


def test_a_step_that_computes_more_prompts_than_seemed_possible_is_believed() -> None:
    steps = load(128, 64)
    limit(steps, 16)
    slow = seconds(steps, 48, 60.0)
    steps.observe_prompts(150, 30)
    assert seconds(steps, 48, 60.0) < 0.7 * slow


def test_what_steps_take_does_not_jump_where_prompts_begin_to_wait() -> None:
    steps = load(128, 64)
    limit(steps, 60)
    tokens = np.linspace(5.0, 120.0, 400)
    found = steps.seconds(np.full(400, 96.0), tokens, 0.0)
    assert np.all(np.diff(found) >= 0.0)
    assert np.abs(np.diff(found)).max() < 0.02 * found[0]


def test_where_steps_leave_prompts_more_tokens_wait_for_their_turn() -> None:
    """120 tokens bring 240 of prompts, and a step computes 60: four steps, each with a quarter of the rows."""
    steps = load(128, 64, with_a_knee(0))
    unlimited = seconds(steps, 160, 120.0)
    limit(steps, 60)
    limited = seconds(steps, 160, 120.0)
    assert limited > unlimited
    num_steps = 120.0 * (60 / 30) / 60
    assert limited == pytest.approx(num_steps * (0.020 + 0.0002 * 60) + 0.0002 * 160, rel=0.05)
