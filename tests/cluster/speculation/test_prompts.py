"""Steps are reckoned with the prompts that their tokens bring along."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.speculation.costs import LearnedCurve
from cluster.speculation.prompts import PromptLoad, StepSeconds


def with_a_knee() -> LearnedCurve:
    """20 ms up to 96 rows, and 0.2 ms for each beyond."""
    curve = LearnedCurve(512)
    for rows in (1, 8, 32, 64, 96, 128, 192, 256, 384, 512):
        curve.observe(rows, 0.020 + 0.0002 * max(0, rows - 96))
    return curve


def load(prompt_len: int, answer_len: int, tokens_a_step: int = 40) -> PromptLoad:
    prompts, rng = PromptLoad(), np.random.default_rng(1)
    for _ in range(400):
        number = int(rng.poisson(tokens_a_step / answer_len))
        for _ in range(number):
            prompts.ended()
            prompts.joined()
        prompts.observe(number * prompt_len, number, tokens_a_step)
    return prompts


def test_without_prompts_a_step_is_one_without_prompts() -> None:
    curve = with_a_knee()
    rows = np.array([1, 48, 200])
    assert StepSeconds(curve, PromptLoad(), 512).at(rows, rows * 2.0) == pytest.approx(curve.at(rows))


@pytest.mark.parametrize("tokens", [20.0, 48.0, 100.0])
def test_with_them_it_is_the_mean_over_their_numbers(tokens: float) -> None:
    curve, rng = with_a_knee(), np.random.default_rng(2)
    numbers = rng.poisson(tokens / 64, 20_000)
    expected = float(curve.at(48 + 128 * numbers).mean())
    (seconds,) = StepSeconds(curve, load(128, 64), 512).at(np.array([48]), np.array([tokens]))
    assert seconds == pytest.approx(expected, rel=0.1)


def test_rows_that_are_free_without_prompts_are_not_beside_them() -> None:
    steps = StepSeconds(with_a_knee(), load(128, 64), 512)
    few, many = steps.at(np.array([48, 96]), np.array([48.0, 48.0]))
    assert many > 1.1 * few


def test_prompts_that_are_over_are_forgotten() -> None:
    prompts = load(128, 64)
    for _ in range(2000):
        prompts.observe(0, 0, 40)
    assert not prompts.is_any


def test_a_load_that_grows_does_not_make_answers_seem_short() -> None:
    """64 prompts of 100 tokens come at once, and end one after the other once they have got their 128 tokens."""
    prompts = PromptLoad()
    for _ in range(64):
        prompts.joined()
    for _ in range(20):
        prompts.observe(320, 3, 64)
    assert prompts.share > 0.99
    assert not prompts.is_any
    for step in range(700):
        is_end = step >= 108 and step % 2 == 0
        if is_end:
            prompts.ended()
            prompts.joined()
        prompts.observe(100 * is_end, int(is_end), 64)
    share, num_tokens = prompts.beside(np.array([64.0]))
    assert share[0] * num_tokens[0] == pytest.approx(64 * 100 / 128, rel=0.05)


def test_a_step_that_computes_more_prompts_than_seemed_possible_is_believed() -> None:
    prompts = load(128, 64)
    for _ in range(100):
        prompts.observe(16, 1, 30, left_some=True)
    prompts.observe(150, 1, 30)
    assert prompts.most_tokens == 150


def test_what_steps_take_does_not_jump_where_prompts_begin_to_wait() -> None:
    curve, prompts = with_a_knee(), load(128, 64)
    for _ in range(200):
        prompts.ended()
        prompts.joined()
        prompts.observe(60, 1, 30, left_some=True)
    tokens = np.linspace(5.0, 120.0, 400)
    seconds = StepSeconds(curve, prompts, 512).at(np.full(400, 96.0), tokens)
    assert np.all(np.diff(seconds) >= 0.0)
    assert np.abs(np.diff(seconds)).max() < 0.02 * seconds[0]
    assert StepSeconds(curve, prompts, 512).num_steps(np.array([5.0, 120.0])) == pytest.approx([1.0, 4.0], rel=0.4)


def test_where_steps_leave_prompts_more_tokens_wait_for_their_turn() -> None:
    """120 tokens bring 240 of prompts, and a step computes 60: four steps, each with a quarter of the rows."""
    curve = LearnedCurve(512)
    for rows in (1, 64, 128, 192, 256, 384, 512):
        curve.observe(rows, 0.020 + 0.0002 * rows)
    prompts = load(128, 64)
    steps = StepSeconds(curve, prompts, 512)
    unlimited = float(steps.at(np.array([160]), np.array([120.0]))[0])
    for _ in range(200):
        prompts.ended()
        prompts.joined()
        prompts.observe(60, 1, 30, left_some=True)
    (seconds,) = steps.at(np.array([160]), np.array([120.0]))
    share, num_prompt_tokens = prompts.beside(np.array([120.0]))
    num_steps = float(share[0] * num_prompt_tokens[0]) / 60
    assert seconds == pytest.approx(num_steps * (0.020 + 0.0002 * 60) + 0.0002 * 160, rel=0.02)
    assert seconds > unlimited
    assert prompts.most_tokens == pytest.approx(60)
