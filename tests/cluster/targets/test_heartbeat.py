"""A loop that has begun a step and does not end it stands still; one that has nothing to do does not."""

from __future__ import annotations

import pytest

from cluster.targets.heartbeat import Heartbeat


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def beat(clock: Clock, seconds: float, number: int = 1) -> Heartbeat:
    """Returns a heartbeat after `number` steps of `seconds` each."""
    heartbeat = Heartbeat(clock)
    for _ in range(number):
        heartbeat.begin()
        clock.now += seconds
        heartbeat.end()
    return heartbeat


@pytest.mark.parametrize(
    ("step_s", "running_s", "is_stuck"),
    [(0.02, 4.9, False), (0.02, 5.1, True), (2.0, 7.9, False), (2.0, 8.1, True)],
)
def test_a_step_may_take_five_seconds_or_four_times_the_longest(
    step_s: float, running_s: float, is_stuck: bool, clock: Clock
) -> None:
    heartbeat = beat(clock, step_s)
    heartbeat.begin()
    clock.now += running_s
    assert heartbeat.is_stuck is is_stuck


def test_between_steps_nothing_is_stuck_nor_busy(clock: Clock) -> None:
    heartbeat = beat(clock, 0.02, number=3)
    clock.now += 3600.0
    assert not heartbeat.is_stuck
    assert heartbeat.busy.value == pytest.approx(0.06)


def test_the_first_step_may_take_longer(clock: Clock) -> None:
    heartbeat = Heartbeat(clock)
    heartbeat.begin()
    clock.now += 60.0
    assert not heartbeat.is_stuck
    clock.now += 61.0
    assert heartbeat.is_stuck


def test_one_that_goes_on_is_well_again(clock: Clock) -> None:
    heartbeat = beat(clock, 0.02)
    heartbeat.begin()
    clock.now += 10.0
    assert heartbeat.is_stuck
    heartbeat.end()
    assert not heartbeat.is_stuck


def test_a_long_step_is_forgotten_after_a_hundred(clock: Clock) -> None:
    heartbeat = beat(clock, 10.0)
    for _ in range(100):
        heartbeat.begin()
        clock.now += 0.02
        heartbeat.end()
    heartbeat.begin()
    clock.now += 5.1
    assert heartbeat.is_stuck


def test_steps_may_overlap(clock: Clock) -> None:
    heartbeat = Heartbeat(clock)
    heartbeat.begin()
    clock.now += 4.0
    heartbeat.begin()
    clock.now += 4.0
    heartbeat.end()
    clock.now += 3.0
    assert not heartbeat.is_stuck
    heartbeat.end()
    assert heartbeat.busy.value == 11.0
    clock.now += 100.0
    assert not heartbeat.is_stuck
