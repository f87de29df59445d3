"""Several clocks: everything happens in the order of its time, and one error ends the run."""

from __future__ import annotations

import pytest

from cluster.simulator.turns import NEVER, Over, TargetTime, Turns


def test_sleeps_and_events_end_in_the_order_of_their_times() -> None:
    turns = Turns()
    happened: list[tuple[float, str]] = []

    def sleep(clock: TargetTime, name: str, seconds: float) -> None:
        for _ in range(20):
            clock.sleep_until(clock.now() + seconds)
            happened.append((clock.now(), name))
        clock.let_others(lambda: NEVER)

    loops = []
    for name, seconds in (("a", 0.3), ("b", 0.7), ("c", 0.31)):
        clock = turns.new_clock()
        loops.append(lambda clock=clock, name=name, seconds=seconds: sleep(clock, name, seconds))
    for at in (0.31, 4.0, 2.0):
        turns.at(at, lambda at=at: happened.append((at, "event")))
    turns.run(loops)
    assert len(happened) == 63
    assert [at for at, _ in happened] == sorted(at for at, _ in happened)
    assert happened[1:3] == [(0.31, "event"), (0.31, "c")]


def test_an_event_ends_the_run_in_the_middle_of_steps() -> None:
    turns = Turns()

    def end() -> None:
        raise Over

    turns.at(1.0, end)
    clocks = [turns.new_clock() for _ in range(2)]
    turns.run([lambda clock=clock: clock.sleep_until(5.0) for clock in clocks])
    assert [clock.now() for clock in clocks] == [0.0, 0.0]


def test_an_error_of_one_loop_is_raised() -> None:
    turns = Turns()
    first, second = turns.new_clock(), turns.new_clock()

    def fail() -> None:
        second.sleep_until(1.0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        turns.run([lambda: first.sleep_until(9.0), fail])
