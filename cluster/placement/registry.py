"""The live workers of a cluster: place, model and load, as recently announced. No I/O; callers pass the time.

A registry is soft state. Workers announce themselves about every second, and the registry forgets a worker after a
period of silence. A lost registry is replaced by an empty one, which fills again. Until the new registry has settled,
callers only add its workers to the lists that they have, so that no caller loses a worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.placement.place import Endpoint, Place
from cluster.speculation.demand import DraftDemand

Pool = Literal["router", "target", "draft"]

HEARTBEAT_SECONDS = 1.0
"""Time between two announcements of a worker."""
SETTLING_SECONDS = 6.0
"""Time during which a new registry only adds to the lists that callers have."""
_EXPIRY_SECONDS = 6.0  # a worker that is silent for longer is forgotten
_FENCE_SECONDS = 120.0  # maximum delay of an announcement


@dataclass(frozen=True, slots=True)
class NodeLabels(Place):
    """Location and hardware of a worker. None: the node does not report the label."""

    accelerator: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # tokens of the waiting sequences
    kv_use: float = 0.0  # share of the KV blocks
    demand: DraftDemand | None = None  # demand of a target for drafts; None: not measured yet
    num_limited: int = 0  # requests compared with a configured limit, since the target's start
    num_late: int = 0  # those over it; refusals of late requests count


@dataclass(frozen=True, slots=True)
class Announcement:
    """A worker's announcement of itself.

    `epoch` grows with every start of a program. If two programs have the same address or replica, the one with the
    larger epoch is valid.
    """

    replica: str
    pool: Pool
    address: str
    epoch: int
    node: NodeLabels = NodeLabels()
    fingerprint: str | None = None  # fingerprint of its tokenizer; None: unknown
    load: Load | None = None


@dataclass(frozen=True, slots=True)
class View:
    """The state of a pool in a registry. `incarnation` identifies the registry; each registry has its own versions."""

    incarnation: int
    version: int
    is_settled: bool
    members: tuple[Announcement, ...]

    @property
    def stamp(self) -> tuple[int, int]:
        """Unique identifier of this state of the list."""
        return self.incarnation, self.version


def endpoints_after(last: Sequence[Endpoint], view: View) -> tuple[Endpoint, ...]:
    """Returns the new list of a caller with the list `last`."""
    current = {member.address: Endpoint(member.address, member.node) for member in view.members}
    known = {endpoint.address: endpoint for endpoint in last}
    return tuple((current if view.is_settled else known | current).values())


class Registry:
    """A registry. All times are seconds of the same monotonic clock."""

    def __init__(self, incarnation: int, now: float) -> None:
        self._incarnation = incarnation
        self._settles_at = now + SETTLING_SECONDS
        self._is_settled = False
        self._ticked_at = now
        self._version = 0
        self._members: dict[str, Announcement] = {}  # by address
        self._heard_at: dict[str, float] = {}  # by address
        self._fences: dict[str, tuple[int, float]] = {}  # by address: last epoch that has ended, and when it ended
        self.tick(now)

    @property
    def version(self) -> int:
        """Number that grows whenever a list changes, and when the registry settles."""
        return self._version

    @property
    def is_empty(self) -> bool:
        return not self._members

    def announce(self, announcement: Announcement, now: float) -> bool:
        """Adds the program to the list. Returns False if it has ended, or a newer one has its replica or address."""
        address, epoch = announcement.address, announcement.epoch
        fence, _ = self._fences.get(address, (-1, 0.0))
        same = self._members.get(address)
        before = [member for member in self._members.values() if member.replica == announcement.replica]
        if epoch <= fence or any(member.epoch > epoch for member in (*before, *([same] if same else []))):
            return False
        for member in before:
            if member.address != address:
                self._forget(member.address)
        self._members[address] = announcement
        self._heard_at[address] = now
        if same is None or (same.replica, same.epoch, same.node) != (announcement.replica, epoch, announcement.node):
            self._version += 1
        return True

    def withdraw(self, address: str, epoch: int, now: float) -> None:
        """Removes a program that is ending. Delayed announcements of the program are ignored from now on."""
        self._fences[address] = (max(epoch, self._fences.get(address, (-1, 0.0))[0]), now)
        if address in self._members and self._members[address].epoch <= epoch:
            self._forget(address)

    def tick(self, now: float) -> None:
        """Forgets workers that have been silent for too long.

        Must be called often. Time without calls does not count as silence, because the registry did not run and could
        not receive announcements.
        """
        stood_still = now - self._ticked_at - HEARTBEAT_SECONDS
        self._ticked_at = now
        if stood_still > 0:
            self._heard_at = {address: heard + stood_still for address, heard in self._heard_at.items()}
        for address, heard in tuple(self._heard_at.items()):
            if now - heard > _EXPIRY_SECONDS:
                self._forget(address)
        self._fences = {
            address: (epoch, since) for address, (epoch, since) in self._fences.items() if now - since < _FENCE_SECONDS
        }
        if not self._is_settled and now >= self._settles_at:
            self._is_settled = True
            self._version += 1

    def view(self, pool: Pool) -> View:
        members = [member for member in self._members.values() if member.pool == pool]
        return View(
            self._incarnation,
            self._version,
            self._is_settled,
            tuple(sorted(members, key=lambda member: member.address)),
        )

    def _forget(self, address: str) -> None:
        del self._members[address], self._heard_at[address]
        self._version += 1
