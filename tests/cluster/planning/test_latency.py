"""Tests of a client's latency: against figures by hand if nothing is random, else against simulation."""

from __future__ import annotations

import math
import random

import pytest

from cluster.planning.latency import StepLoad, latency, mean_rounds
from cluster.speculation.answer_time import token_moments


def test_moments_of_the_tokens_a_round() -> None:
    # a = 0.5, k = 2: one token with 1/2, two with 1/4, three with 1/4
    # mean 1.75; E[X^2] = 1/2 + 4/4 + 9/4 = 3.75
    assert token_moments([0.5, 0.25]) == pytest.approx((1.75, 3.75))


def test_rounds_of_an_answer() -> None:
    # plain: one round a token. a = 1, k = 3: four tokens a round; the last may lose 0 to 3 of them, 1.5 on average
    assert mean_rounds(0.0, 0, 63) == 63
    assert mean_rounds(1.0, 3, 63) == pytest.approx((63 + 1.5) / 4)


@pytest.mark.parametrize(("acceptance", "k"), [(0.8, 4), (0.5, 2), (0.9, 8)])
def test_rounds_of_an_answer_as_drawn(acceptance: float, k: int) -> None:
    rng = random.Random(0)

    def rounds(num_tokens: int) -> int:
        count = 0
        while num_tokens > 0:
            num_tokens -= 1 + next((i for i in range(k) if rng.random() >= acceptance), k)
            count += 1
        return count

    drawn = [rounds(100) for _ in range(4000)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean_rounds(acceptance, k, 100), rel=0.01)


def test_alone_and_plain_nothing_is_left_to_chance() -> None:
    # a step of 20 ms, with the prompt 50 ms
    own = latency(StepLoad((0.020, 0.050), 0.0, is_alone=True), 0.0, 0, 64)
    assert (own.first_token, own.first_token_p99) == (0.050, 0.050)
    assert own.between_tokens == pytest.approx(0.020)
    assert own.between_tokens_p99 == pytest.approx(0.020)
    assert own.pause_p99 == 0.020


def test_a_request_waits_for_the_rest_of_the_running_step() -> None:
    # hardly any other prompts: 0 to 20 ms of the running step, evenly, then 50 ms
    own = latency(StepLoad((0.020, 0.050, 0.080), 1e-9), 0.0, 0, 64)
    assert own.first_token == pytest.approx(0.060, abs=0.0005)
    assert own.first_token_p99 == pytest.approx(0.070, abs=0.0005)


def test_prompts_of_others_make_steps_longer() -> None:
    quiet, busy = (latency(StepLoad((0.020, 0.050, 0.080), prompts), 0.0, 0, 64) for prompts in (0.05, 0.5))
    assert busy.first_token > quiet.first_token
    assert busy.between_tokens > quiet.between_tokens
    assert busy.pause_p99 == 0.080
    # one in 20 steps has a prompt (Poisson of 0.05: 0.951 none, 0.048 one, 0.001 more): the mean is 20 + 0.05 * 30 ms
    assert quiet.between_tokens == pytest.approx(0.0215, rel=1e-3)


def test_many_prompts_a_step_are_as_many_on_the_average() -> None:
    """e**-760 is 0 in a double."""
    load = StepLoad(tuple(0.020 + 0.001 * n for n in range(2000)), 760.0)
    assert load.mean_seconds == pytest.approx(0.780)
    assert load.variance == pytest.approx(760 * 0.001**2, rel=1e-3)


def test_chance_in_the_tokens_a_round_spreads_answers() -> None:
    # E = 2.05 (a = 0.6, k = 3: 1 + 0.6 + 0.36 + 0.216 = 2.176)
    own = latency(StepLoad((0.020, 0.020), 0.0), 0.6, 3, 101)
    # (100 + overshoot) / 2.176 rounds of 20 ms over 100 tokens; E[X^2] = 1 + 3 * 0.6 + 5 * 0.36 + 7 * 0.216 = 6.112
    # overshoot (6.112 / 2.176 - 1) / 2 = 0.904
    assert own.between_tokens == pytest.approx(0.020 * 100.904 / 2.176 / 100, rel=1e-3)
    # variance of the rounds: 100 * (6.112 - 4.735) / 2.176^3 = 13.36, deviation 3.655; 2.326 * 3.655 * 20 ms / 100
    assert own.between_tokens_p99 - own.between_tokens == pytest.approx(0.001701, rel=1e-2)


def test_prompts_that_a_step_has_no_room_for_wait() -> None:
    rng, mean, waiting, seen = random.Random(0), 0.8, 0, [0] * 200
    for _ in range(100_000):
        seen[waiting] += 1
        coming, product = 0, rng.random()
        while product > math.exp(-mean):  # Poisson, as Knuth draws it
            coming, product = coming + 1, product * rng.random()
        waiting = max(0, waiting - 1) + coming
    load = StepLoad((0.020, 0.070), mean)
    assert load.waiting[:4].tolist() == pytest.approx([count / 100_000 for count in seen[:4]], abs=0.01)
    # one step in 1 / 0.8 has a prompt
    assert load.mean_seconds == pytest.approx(0.060, rel=0.01)


def test_a_long_prompt_takes_several_steps() -> None:
    own = StepLoad((0.020, 0.070), 1e-9, steps_a_prompt=4)
    assert own.mean_first_token == pytest.approx(0.010 + 4 * 0.070)
    assert latency(own, 0.0, 0, 64).first_token_p99 == pytest.approx(0.300, abs=0.001)


def test_acceptance_may_differ_by_place() -> None:
    # A round has 1 + 0.8 + 0.8 * 0.5 + 0.8 * 0.5 * 0.5 tokens. Its last ones may be too many.
    assert mean_rounds((0.8, 0.5), 3, 2400) == pytest.approx(1000, abs=1)
