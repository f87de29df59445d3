"""The live workers of a cluster: place, model and load, as recently announced. No I/O; callers pass the time.

It is soft state. A worker announces itself about every second and is forgotten after a period of silence. So a lost
registry is replaced by an empty one that fills again. Until that has settled, its lists only add to those that callers
have, so that no caller loses a worker because the registry is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.config.ray import PlacementConfig
from cluster.placement.place import Endpoint, Place
from cluster.speculation.demand import DraftDemand

Pool = Literal["router", "target", "draft"]

_FENCE_SECONDS = 120.0  # a delayed announcement arrives within this time


@dataclass(frozen=True, slots=True)
class NodeLabels(Place):
    """Location of a worker and its hardware; None: the node does not report it."""

    accelerator: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # tokens of the waiting sequences
    kv_use: float = 0.0  # share of the KV blocks
    demand: DraftDemand | None = None  # demand of a target that has measured what drafts gain


@dataclass(frozen=True, slots=True)
class Announcement:
    """A worker's announcement of itself.

    `epoch` grows with every start of a program: if two programs have one address, or one replica, the greater is valid.
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
    """A pool in a registry. Versions belong to one registry (`incarnation`); another one starts over."""

    incarnation: int
    version: int
    is_settled: bool
    members: tuple[Announcement, ...]

    @property
    def stamp(self) -> tuple[int, int]:
        """Identifier of this state of the list, different from that of every other state."""
        return self.incarnation, self.version


def endpoints_after(last: Sequence[Endpoint], view: View) -> tuple[Endpoint, ...]:
    """Returns the new list of a caller that had `last`."""
    current = {member.address: Endpoint(member.address, member.node) for member in view.members}
    known = {endpoint.address: endpoint for endpoint in last}
    return tuple((current if view.is_settled else known | current).values())


class Registry:
    """The registry. Times are seconds of one monotonic clock."""

    def __init__(self, incarnation: int, config: PlacementConfig, now: float) -> None:
        self._incarnation = incarnation
        self._config = config
        self._settles_at = now + config.settling_seconds
        self._is_settled = False
        self._ticked_at = now
        self._version = 0
        self._members: dict[str, Announcement] = {}  # by address
        self._heard_at: dict[str, float] = {}  # by address
        self._fences: dict[str, tuple[int, float]] = {}  # by address: epochs up to this one are gone, and since when
        self.tick(now)

    @property
    def version(self) -> int:
        """Version, which grows whenever a list changes, or becomes reliable."""
        return self._version

    @property
    def is_empty(self) -> bool:
        return not self._members

    def announce(self, announcement: Announcement, now: float) -> bool:
        """Lists the program. Returns False if a newer one of the same replica, or at the same address, is known."""
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
        """Removes the program, which is ending: earlier announcements that arrive later do not list it again."""
        self._fences[address] = (max(epoch, self._fences.get(address, (-1, 0.0))[0]), now)
        if address in self._members and self._members[address].epoch <= epoch:
            self._forget(address)

    def tick(self, now: float) -> None:
        """Forgets workers that have been silent for too long.

        Must be called often. Time without a call does not count as silence, because a registry that did not run
        received nothing.
        """
        stood_still = now - self._ticked_at - self._config.heartbeat_seconds
        self._ticked_at = now
        if stood_still > 0:
            self._heard_at = {address: heard + stood_still for address, heard in self._heard_at.items()}
        for address, heard in tuple(self._heard_at.items()):
            if now - heard > self._config.expiry_seconds:
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
