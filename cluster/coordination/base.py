"""Interfaces of a coordinator's links to its draft workers, in any process."""

from __future__ import annotations

import enum
import queue
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.telemetry.metrics import Reading
from cluster.wire.messages import SpeculateReply, SpeculateRequest


class LinkState(enum.Enum):
    DOWN = enum.auto()
    UP = enum.auto()


class Link(Protocol):
    """Connection to one draft worker; compared by identity."""

    address: str  # address of the worker; "": the drafter runs in this process
    model: str  # the worker's draft model, as of when the link came up
    is_one_pass: bool  # whether the drafter computes all tokens of a proposal in one step
    expected_round_trip: float | None  # seconds, estimated from the worker's place; None: unknown

    def send(self, request: SpeculateRequest) -> None:
        """Sends `request`. The caller must not use `request` afterwards.

        Never blocks; drops the request while the link is down.
        """


@dataclass(frozen=True, slots=True)
class LinkEvent:
    """An event on a link: the link went up or down, or a reply came."""

    link: Link
    event: LinkState | SpeculateReply
    answer_seconds: float = 0.0  # seconds between the link's last message and the reply
    num_bytes: int = 0  # size of a reply that a worker sent


class LinkPool(ABC):
    """The draft workers that one coordinator may use."""

    trial_share: float  # share of the sequences that try draft models other than the best
    drafts_in_turn = False  # True: drafters compute in the engine's thread, in `lend_turn` and in a `poll` that waits
    drafting_seconds = 0.0  # processor time that drafters used in the engine's thread

    @property
    @abstractmethod
    def num_endpoints(self) -> int:
        """Number of draft workers that are listed now. Thread-safe."""

    @property
    @abstractmethod
    def num_links_up(self) -> int:
        """Number of links that are up. Thread-safe."""

    @abstractmethod
    async def run(self, endpoints: AsyncIterator[Sequence[str]]) -> None:
        """Keeps a link to every endpoint until cancelled, in an event loop.

        Each item of `endpoints` is a complete list that replaces the previous one.
        """

    @abstractmethod
    def poll(self, timeout: float = 0.0) -> list[LinkEvent]:
        """Returns the events since the last call, waiting up to `timeout` seconds for the first.

        Must be called by the engine's thread, like `lend_turn`.
        """

    def lend_turn(self) -> None:  # noqa: B027  # drafters with threads of their own need none
        """Lets drafters in the engine's thread make the requested proposals although no step waits for them.

        They compute at most one step of prompts.
        """

    def readings(self) -> Iterator[Reading]:
        """Any thread."""
        yield Reading("outrider_draft_links_up", "Connected links to draft workers.", self.num_links_up)
        yield Reading("outrider_draft_links_configured", "Listed draft workers.", self.num_endpoints)


def take_all(events: queue.SimpleQueue[LinkEvent], timeout: float) -> list[LinkEvent]:
    """Returns all `events`, waiting up to `timeout` seconds for the first. Requires that no other caller takes any."""
    taken: list[LinkEvent] = []
    if timeout > 0.0:
        try:
            taken.append(events.get(timeout=timeout))
        except queue.Empty:
            return taken
    while not events.empty():
        taken.append(events.get_nowait())
    return taken
