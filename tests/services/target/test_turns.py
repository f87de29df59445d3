"""Owners of requests have equal turns at a target."""

from __future__ import annotations

from services.target.turns import OwnerTurns

A, B = b"a", b"b"


def turn_of(number: int) -> int:
    return number >> 32


def test_who_has_much_under_way_comes_later() -> None:
    turns = OwnerTurns()
    own = [turn_of(turns.enter(f"a{index}", A, 0, 1024)) for index in range(8)]
    assert own == [0, 1, 2, 2, 3, 3, 3, 3]
    assert turn_of(turns.enter("b0", B, 0, 1024)) == 0
    for index in range(8):
        turns.leave(f"a{index}")
    assert turn_of(turns.enter("a8", A, 0, 1024)) == 0


def test_small_requests_share_a_turn() -> None:
    turns = OwnerTurns()
    assert {turns.enter(f"a{index}", A, 0, 256) for index in range(4)} == {0}


def test_priority_orders_the_requests_of_a_turn() -> None:
    turns = OwnerTurns()
    later, sooner = turns.enter("later", A, 10, 500), turns.enter("sooner", A, -10, 500)
    assert sooner < later
    assert turn_of(sooner + 10) == turn_of(later) == 0


def test_an_urgent_request_does_not_wait_for_the_owners_others() -> None:
    turns = OwnerTurns()
    for index in range(4):
        turns.enter(f"a{index}", A, 0, 4096)
    urgent = turns.enter("urgent", A, -(2**31), 4096)
    assert urgent < turns.enter("b0", B, 0, 4096) < turns.enter("next", A, 0, 4096)
    turns.leave("urgent")
    turns.leave("unknown")


def test_lowest_priorities_keep_nobody_waiting_for_ever() -> None:
    turns = OwnerTurns()
    for index in range(64):
        turns.enter(f"a{index}", A, -(2**31), 1024)
    assert turns.enter("b0", B, 0, 1024) < turns.enter("more", A, -(2**31), 1024)


def test_without_an_owner_priority_is_the_turn() -> None:
    turns = OwnerTurns()
    numbers = [turns.enter(f"x{index}", b"", priority, 9999) for index, priority in enumerate((0, -7, 3, -(2**31)))]
    assert [turn_of(number) for number in numbers] == [0, -7, 3, -(2**31)]
    assert all(-(2**63) <= number < 2**63 for number in numbers)


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    turns = OwnerTurns()
    for index in range(100):
        turns.enter(str(index), bytes([index]), index - 50, 300)
    for index in range(100):
        turns.leave(str(index))
    assert not turns._work
    assert not turns._entered
