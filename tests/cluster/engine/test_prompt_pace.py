"""Prompts share a step by a rule, and take as much of it as a set time allows."""

from __future__ import annotations

import pytest

from cluster.engine.prompt_pace import PromptPace, PromptPart, share


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


def tokens(pace: PromptPace, num_left: int, budget: int = 4096, *, is_alone: bool = False) -> int:
    """Returns how many tokens of one prompt the next step computes."""
    return pace.share([PromptPart(num_left, 0)], budget, pace.budget(is_alone=is_alone))[0]


def settle(pace: PromptPace, seconds_of: dict[str, float], num_rows: int, budget: int = 4096) -> int:
    """The prompt tokens a step has after some on a machine that takes `base` a step and `token` more for each."""
    for _ in range(300):
        num_tokens = tokens(pace, 10_000, budget)
        rows = num_rows + num_tokens
        pace.observe(rows, [PromptPart(num_tokens, 0)], seconds_of["base"] + seconds_of["token"] * rows)
        pace.observe(num_rows, [], seconds_of["base"] + seconds_of["token"] * num_rows)
    return tokens(pace, 10_000, budget)


def test_prompts_add_the_set_time_to_a_step_whatever_the_step_takes_itself() -> None:
    for base in (0.001, 0.2):
        assert settle(PromptPace(0.05, 4096), {"base": base, "token": 2e-4}, 8) == pytest.approx(250, rel=0.3)


def test_a_prompt_that_nobody_waits_for_adds_four_times_as_much() -> None:
    pace = PromptPace(0.05, 4096)
    settle(pace, {"base": 0.01, "token": 2e-4}, 8)
    assert tokens(pace, 10_000, is_alone=True) == pytest.approx(min(1000, 2 * tokens(pace, 10_000)), rel=0.3)


def test_a_machine_that_is_fast_takes_all_there_is_room_for() -> None:
    assert settle(PromptPace(0.05, 4096), {"base": 0.01, "token": 1e-6}, 8, 4000) == 4000


def test_a_machine_that_is_slow_gets_on() -> None:
    pace = PromptPace(0.05, 4096)
    assert settle(pace, {"base": 0.01, "token": 1.0}, 8) == 16
    assert tokens(pace, 10_000, 3) == 3


def test_before_anything_is_known_a_step_is_short_and_then_at_most_twice_what_was_seen() -> None:
    pace = PromptPace(0.05, 4096)
    assert tokens(pace, 10_000) == 64
    pace.observe(64, [PromptPart(64, 0)], 0.001)
    assert tokens(pace, 10_000) == 128


def test_without_a_limit_a_step_is_filled() -> None:
    assert tokens(PromptPace(None, 4096), 10_000, 4000) == 4000


def test_what_was_tried_before_the_first_request_counts() -> None:
    pace = PromptPace(0.05, 512)
    pace.know([(1, 0.01), (2, 0.01), (4, 0.01), (8, 0.01), (16, 0.02), (32, 0.035), (64, 0.06), (128, 0.11)])
    assert tokens(pace, 10_000, 512) == pytest.approx(64, rel=0.2)


def run_long_prompt(pace: PromptPace, num_short: int = 0) -> tuple[list[float], list[int]]:
    """Runs a prompt of 30,000 tokens, on a machine where a token's cost grows from 8 to 68 microseconds.

    Returns the seconds that prompts add to each step, and the number of steps for each short prompt. Short prompts have
    `num_short` tokens, and each arrives when the one before it is done.
    """
    added, num_done, steps_of_short = [], 0, [0]
    left = num_short
    while num_done < 30_000:
        prompts = [PromptPart(30_000 - num_done, num_done)] + (
            [PromptPart(left, num_short - left)] if num_short else []
        )
        chunks = pace.share(prompts, 8188, pace.budget(is_alone=False))
        parts = [PromptPart(n, prompt.num_before) for n, prompt in zip(chunks, prompts, strict=True) if n]
        added.append(sum((8e-6 + 2e-9 * (part.num_before + part.num_tokens / 2)) * part.num_tokens for part in parts))
        pace.observe(4 + sum(chunks), parts, 0.004 + added[-1])
        num_done += chunks[0]
        if num_short:
            left -= chunks[1]
            steps_of_short[-1] += 1
            if not left:
                left = num_short
                steps_of_short.append(0)
    return added, steps_of_short[:-1]


def test_a_long_prompt_whose_tokens_take_ever_longer_adds_the_set_time_to_every_step() -> None:
    pace = PromptPace(0.05, 8192)
    pace.know((num_rows, 0.004) for num_rows in (1, 2, 4, 8, 16, 32, 64))
    for _ in range(3):  # each prompt starts again without a prefix
        added, _ = run_long_prompt(pace)
        assert max(added) < 0.055
        assert sum(added) / len(added) > 0.04


def test_a_short_prompt_is_done_at_once_beside_a_long_one_whose_tokens_cost_more() -> None:
    pace = PromptPace(0.05, 8192)
    run_long_prompt(pace)
    added, steps = run_long_prompt(pace, num_short=1000)  # 9 ms, where of the long one's tokens 370 take the 25 left
    assert max(steps[len(steps) // 2 :]) == 1
    assert max(added) < 0.06


def limited(first_token_limit: float = float("inf")) -> PromptPace:
    """A pace of 50 ms on a machine that takes 10 ms a step and 0.1 ms more for each row."""
    pace = PromptPace(0.050, 4096, first_token_limit)
    settle(pace, {"base": 0.010, "token": 0.0001}, 8)
    return pace


def budget(pace: PromptPace, *num_left: int) -> float:
    return pace.budget(is_alone=False, prompts=[PromptPart(number, 0) for number in num_left], num_rows=8)


def test_answers_with_limits_lower_the_set_time() -> None:
    pace = limited()
    assert budget(pace, 1000) == 0.050
    for spare, least in ((0.070, 0.050), (0.020, 0.020), (-1.0, 1e-6)):
        pace.spare_seconds = spare
        assert budget(pace, 1000) == least
    assert pace.share([PromptPart(1000, 0)], 4096, budget(pace, 1000)) == [16]  # it makes progress
    assert pace.budget(is_alone=True) == 0.200


def test_prompts_get_what_their_own_limit_needs() -> None:
    """1,000 tokens take 0.1 s, half of what a limit of 0.4 s leaves for them, so half of the time is theirs."""
    pace = limited(0.4)
    pace.spare_seconds = 0.001
    assert budget(pace, 1000) == pytest.approx(0.0108, rel=0.1)  # as long as a step of 8 rows without them
    assert budget(pace, 300, 700) == pytest.approx(0.0108, rel=0.1)
    assert budget(pace, 1900) == 0.050  # too much for half of the limit, and never more than the set time
    assert budget(pace, 10) < 0.002
