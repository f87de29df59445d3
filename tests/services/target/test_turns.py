"""Owners of requests have equal turns at a target."""

from __future__ import annotations

from services.target.turns import Turns

A, B = b"a", b"b"


def test_who_has_much_under_way_comes_later() -> None:
    turns = Turns()
    own = [turns.enter(f"a{index}", A, 0, 1024) for index in range(8)]
    assert own == [0, 1, 2, 2, 3, 3, 3, 3]
    assert turns.enter("b0", B, 0, 1024) == 0
    for index in range(8):
        turns.leave(f"a{index}")
    assert turns.enter("a8", A, 0, 1024) == 0


def test_small_requests_share_a_turn() -> None:
    turns = Turns()
    assert {turns.enter(f"a{index}", A, 0, 256) for index in range(4)} == {0}


def test_priority_orders_an_owners_own_requests_only() -> None:
    turns = Turns()
    for index in range(4):
        turns.enter(f"a{index}", A, 0, 4096)
    assert turns.enter("urgent", A, -(2**31), 4096) == 0
    assert turns.enter("later", A, 5, 4096) > turns.enter("b0", B, 5, 4096) == 0
    turns.leave("urgent")
    turns.leave("unknown")
    assert turns.enter("next", A, 0, 4096) > 0


def test_without_an_owner_priority_is_as_it_was() -> None:
    turns = Turns()
    assert [turns.enter(f"x{index}", b"", priority, 9999) for index, priority in enumerate((0, -7, 3))] == [0, -7, 3]


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    turns = Turns()
    for index in range(100):
        turns.enter(str(index), bytes([index]), index, 300)
    for index in range(100):
        turns.leave(str(index))
    assert not turns._work
    assert not turns._entered
