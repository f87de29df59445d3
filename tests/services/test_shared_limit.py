from __future__ import annotations

import pytest

from services.shared_limit import SharedLimit


def fill(limit: SharedLimit, owner: str | bytes | None) -> int:
    """Takes one after the other until there is no room. Returns how many."""
    taken = 0
    while limit.has_room(owner, 1):
        limit.take(owner, 1)
        taken += 1
    return taken


def test_one_owner_leaves_a_fifth_and_each_further_one_leaves_some() -> None:
    limit = SharedLimit(1000)
    assert [fill(limit, owner) for owner in "abcd"] == [800, 160, 32, 6]
    assert [limit.has_room(owner, 1) for owner in "abcde"] == [False, False, False, False, True]


def test_two_large_amounts_of_one_owner_leave_something() -> None:
    limit = SharedLimit(1000)
    limit.take("a", 499)
    assert not limit.has_room("a", 499)
    assert limit.has_room("b", 300)


def test_what_is_given_back_is_for_whoever_has_least() -> None:
    limit = SharedLimit(1000)
    fill(limit, "a")
    limit.give_back("a", 100)
    assert limit.has_room("b", 239)
    limit.give_back("a", 700)
    assert limit.held == 0
    assert fill(limit, "b") == 800


@pytest.mark.parametrize("nobody", [None, "", b""])
def test_without_a_name_the_whole_limit_is_free(nobody: str | bytes | None) -> None:
    assert fill(SharedLimit(1000), nobody) == 1000


def test_one_is_always_allowed_if_there_is_room() -> None:
    assert fill(SharedLimit(1), "a") == 1
    assert SharedLimit(1000).has_room("a", 1000)
    assert not SharedLimit(1000).has_room("a", 1001)
