"""The registry: who is listed, when a list changes, who is fenced off, and what a new registry may not do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cluster.placement.place import Endpoint
from cluster.placement.registry import Announcement, Load, NodeLabels, Registry, View, endpoints_after


def target(name: str, epoch: int = 1, replica: str | None = None) -> Announcement:
    return Announcement(replica or f"replica {name}", "target", f"{name}:1", epoch)


class Clock:
    """A registry whose workers announce themselves every second of its time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.registry = Registry(7, self.now)

    def passes(self, seconds: int, *alive: Announcement) -> None:
        for _ in range(seconds):
            self.now += 1
            for announcement in alive:
                self.registry.announce(announcement, self.now)
            self.registry.tick(self.now)

    def announce(self, announcement: Announcement) -> bool:
        return self.registry.announce(announcement, self.now)

    @property
    def listed(self) -> list[str]:
        return [member.address for member in self.registry.view("target").members]


def listed_after(last: Sequence[str], view: View) -> tuple[str, ...]:
    return tuple(endpoint.address for endpoint in endpoints_after([Endpoint(address) for address in last], view))


@pytest.fixture
def clock() -> Clock:
    clock = Clock()
    clock.passes(6)
    return clock


def test_pools_are_listed_apart_and_in_order(clock: Clock) -> None:
    draft = Announcement("d", "draft", "x:2", 1, NodeLabels(zone="a"), "fingerprint", Load(1, 2))
    assert all(clock.announce(worker) for worker in (target("b"), draft, target("a")))
    assert clock.listed == ["a:1", "b:1"]
    assert clock.registry.view("draft").members == (draft,)
    assert clock.registry.view("router").members == ()


def test_the_version_changes_with_the_lists_and_not_with_the_load(clock: Clock) -> None:
    clock.announce(target("a"))
    version = clock.registry.version
    clock.announce(replace(target("a"), load=Load(5, 5)))
    assert clock.registry.version == version
    assert clock.registry.view("target").members[0].load == Load(5, 5)
    clock.announce(target("b"))
    assert clock.registry.version > version


def test_who_is_silent_is_forgotten(clock: Clock) -> None:
    clock.announce(target("a"))
    clock.passes(7, target("b"))
    assert clock.listed == ["b:1"]


def test_a_registry_that_stood_still_forgets_nobody(clock: Clock) -> None:
    clock.announce(target("a"))
    clock.now += 60
    clock.registry.tick(clock.now)
    assert clock.listed == ["a:1"]
    clock.passes(7)
    assert clock.listed == []


@pytest.mark.parametrize(
    ("first", "second", "is_listed"),
    [
        (target("a", 2), target("a", 1, "another"), False),  # an older program at the address
        (target("a", 1), target("a", 2, "another"), True),
        (target("a", 2, "r"), target("b", 1, "r"), False),  # an older program of the replica
        (target("a", 1, "r"), target("b", 2, "r"), True),
        (target("a", 1), target("b", 1), True),
    ],
)
def test_of_two_programs_the_newer_is_there(
    clock: Clock, first: Announcement, second: Announcement, is_listed: bool
) -> None:
    assert clock.announce(first)
    assert clock.announce(second) is is_listed
    assert (second.address in clock.listed) is (is_listed or first.address == second.address)
    if first.replica == second.replica:
        assert len(clock.listed) == 1


def test_what_was_withdrawn_is_not_brought_back_by_a_late_announcement(clock: Clock) -> None:
    clock.announce(target("a", 3))
    clock.registry.withdraw("a:1", 3, clock.now)
    assert clock.listed == []
    assert not clock.announce(target("a", 3))
    assert clock.announce(target("a", 4))


def test_a_program_does_not_withdraw_its_successor(clock: Clock) -> None:
    clock.announce(target("a", 4))
    clock.registry.withdraw("a:1", 3, clock.now)
    assert clock.listed == ["a:1"]


def test_a_new_registry_only_adds_to_the_lists_until_it_has_settled() -> None:
    clock = Clock()
    last = ("a:1", "b:1")
    assert listed_after(last, clock.registry.view("target")) == last
    clock.announce(target("b"))
    clock.announce(target("c"))
    assert listed_after(last, clock.registry.view("target")) == ("a:1", "b:1", "c:1")
    unsettled = clock.registry.view("target").stamp
    clock.passes(6, target("b"), target("c"))
    settled = clock.registry.view("target")
    assert settled.stamp != unsettled
    assert listed_after(last, settled) == ("b:1", "c:1")


def test_an_empty_list_of_a_settled_registry_is_one(clock: Clock) -> None:
    assert listed_after(("a:1",), clock.registry.view("target")) == ()


def test_two_registries_never_have_the_same_stamp(clock: Clock) -> None:
    assert Registry(8, 0.0).view("target").stamp != Registry(9, 0.0).view("target").stamp


def test_a_caller_hears_where_a_worker_is(clock: Clock) -> None:
    clock.announce(replace(target("a"), node=NodeLabels(host="h1", zone="z", accelerator="A100")))
    (endpoint,) = endpoints_after((), clock.registry.view("target"))
    assert str(endpoint) == "a:1 host=h1 zone=z"
