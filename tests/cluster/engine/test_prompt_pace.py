"""Prompts share a step by a rule, and take as much of it as a set time allows."""

from __future__ import annotations

import pytest

from cluster.engine.prompt_pace import PromptPace, share


@pytest.mark.parametrize(
    ("lengths", "budget", "shares"),
    [
        ([], 10, []),
        ([30], 10, [10]),
        ([30_000, 50], 100, [50, 50]),
        ([30_000, 50], 200, [150, 50]),  # what the others leave is the oldest's
        ([30_000, 900, 30, 20], 100, [50, 0, 30, 20]),  # the shortest first
        ([10, 900, 800], 100, [10, 0, 90]),
        ([900, 800], 1, [1, 0]),
        ([5, 5], 100, [5, 5]),
        ([5, 5], 0, [0, 0]),
    ],
)
def test_the_oldest_has_half_and_the_shortest_go_first(lengths: list[int], budget: int, shares: list[int]) -> None:
    assert share(lengths, budget) == shares


def settle(pace: PromptPace, seconds_of: dict[str, float], num_rows: int, budget: int = 4096) -> int:
    """The prompt tokens a step has after some on a machine that takes `base` a step and `token` more for each."""
    for _ in range(300):
        num_tokens = pace.num_tokens(num_rows, budget)
        rows = num_rows + num_tokens
        pace.observe(rows, num_tokens, seconds_of["base"] + seconds_of["token"] * rows)
        pace.observe(num_rows, 0, seconds_of["base"] + seconds_of["token"] * num_rows)
    return pace.num_tokens(num_rows, budget)


def test_prompts_add_the_set_time_to_a_step_whatever_the_step_takes_itself() -> None:
    for base in (0.001, 0.2):
        assert settle(PromptPace(0.05, 4096), {"base": base, "token": 2e-4}, 8) == pytest.approx(250, rel=0.3)


def test_a_machine_that_is_fast_takes_all_there_is_room_for() -> None:
    assert settle(PromptPace(0.05, 4096), {"base": 0.01, "token": 1e-6}, 8, 4000) == 4000


def test_a_machine_that_is_slow_gets_on() -> None:
    pace = PromptPace(0.05, 4096)
    assert settle(pace, {"base": 0.01, "token": 1.0}, 8) == 16
    assert pace.num_tokens(8, 3) == 3


def test_before_anything_is_known_a_step_is_short_and_then_at_most_twice_what_was_seen() -> None:
    pace = PromptPace(0.05, 4096)
    assert pace.num_tokens(0, 4096) == 64
    pace.observe(64, 64, 0.001)
    assert pace.num_tokens(0, 4096) == 128


def test_without_a_limit_a_step_is_filled() -> None:
    assert PromptPace(None, 4096).num_tokens(10, 4000) == 4000


def test_what_was_tried_before_the_first_request_counts() -> None:
    pace = PromptPace(0.05, 512)
    pace.know([(1, 0.01), (2, 0.01), (4, 0.01), (8, 0.01), (16, 0.02), (32, 0.035), (64, 0.06), (128, 0.11)])
    assert pace.num_tokens(0, 512) == pytest.approx(64, rel=0.2)


def test_a_long_prompt_whose_tokens_take_ever_longer_adds_the_set_time_to_every_step() -> None:
    pace = PromptPace(0.05, 8192)
    pace.know((num_rows, 0.004) for num_rows in (1, 2, 4, 8, 16, 32, 64))
    for _ in range(3):  # the second begins anew after the first
        added, num_done = [], 0
        while num_done < 30_000:
            num_tokens = min(pace.num_tokens(4, 8188), 30_000 - num_done)
            added.append((8e-6 + 2e-9 * (num_done + num_tokens / 2)) * num_tokens)
            pace.observe(4 + num_tokens, num_tokens, 0.004 + added[-1])
            num_done += num_tokens
        assert max(added) < 0.08
        assert sum(added) / len(added) > 0.04
