"""The replicas of the target that can answer now, and the choice of one for a request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from types import TracebackType

import grpc

from cluster.errors import UnavailableError
from cluster.transport.dialing import PLAIN, Dialer
from services.router.targets.affinity import CHOICES, Routing, RoutingKey
from services.router.targets.replica import AdapterRef, LossReason, Replica, ReplicaLostError
from services.router.targets.retry_after import RetryAfter
from services.router.targets.traits import PATIENCE_S, Reference, Traits

__all__ = ["AdapterRef", "Limits", "LossReason", "Replica", "ReplicaLostError", "ReplicaPool", "Traits"]

logger = logging.getLogger(__name__)

_FIRST_LIST_TIMEOUT_S = 5.0
_CHANGE_TIMEOUT_S = PATIENCE_S + 2.0
_NO_TARGET = "no target worker can answer now; see /health"


@dataclass(frozen=True)
class Limits:
    """The limits that all usable replicas share: a sequence within them can run on any."""

    vocab_size: int
    max_model_len: int
    max_speculative_tokens: int
    wire_version: int
    eos_token_ids: frozenset[int] = frozenset()
    fingerprint: str = ""  # fingerprint of the traits, on which answers depend in addition to the request


class ReplicaPool:
    """The replicas at `endpoints`, polled in the background while the pool is entered.

    Each item of `endpoints` is a complete list of addresses, which replaces the one before. A replica that is no longer
    listed gets no new calls, and is closed after its last one.
    """

    def __init__(
        self,
        endpoints: AsyncIterator[Sequence[str]],
        tokenizer_fingerprint: str,
        *,
        allow_different: bool = False,
        routing: Routing = "affinity",
        dialer: Dialer = PLAIN,
    ) -> None:
        """`allow_different`: whether to use replicas together although their answers may differ.

        `dialer`: makes the channels.
        """
        self.replicas: tuple[Replica, ...] = ()
        self._endpoints = endpoints
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._reference = None if allow_different else Reference()
        self.routing = routing
        self._dialer = dialer
        self._polls: dict[Replica, asyncio.Task[None]] = {}  # includes leaving replicas
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()  # replaced on every change
        self._retry_after = RetryAfter(time.monotonic())

    async def __aenter__(self) -> ReplicaPool:
        has_begun = asyncio.Event()
        self._tasks.add(asyncio.create_task(self._follow(has_begun)))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(has_begun.wait(), _FIRST_LIST_TIMEOUT_S)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        tasks = [*self._tasks, *self._polls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in self._polls:
            with contextlib.suppress(grpc.aio.BaseError):
                await replica.close()

    @property
    def usable(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.problem is None]

    @property
    def retry_after(self) -> int:
        """Seconds after which a client without a usable target may retry."""
        return self._retry_after.retry_after

    def limits(self) -> Limits:
        """Returns the limits. Raises UnavailableError if no replica can answer."""
        descriptions = [replica.description for replica in self.usable if replica.description is not None]
        if not descriptions:
            raise self.nobody()
        return Limits(
            vocab_size=min(description.model.vocab_size for description in descriptions),
            max_model_len=min(description.model.max_model_len for description in descriptions),
            max_speculative_tokens=min(description.max_speculative_tokens for description in descriptions),
            wire_version=min(description.wire_version for description in descriptions),
            eos_token_ids=frozenset(descriptions[0].eos_token_ids),
            fingerprint=_fingerprint(tuple(sorted(descriptions[0].traits.items()))),
        )

    def adapters(self) -> dict[str, AdapterRef]:
        """Returns the adapters that are usable now.

        If replicas have different adapters of one name, the most common one is returned.
        """
        held = Counter(AdapterRef(*item) for replica in self.usable for item in (replica.adapters or {}).items())
        return {adapter.name: adapter for adapter, _ in sorted(held.items(), key=lambda item: (item[1], item[0]))}

    def knows(self, adapter: str) -> bool:
        """Returns whether a listed replica may have the adapter.

        True if one had it when it last answered, or if none is usable and one has never answered.
        """
        is_unknown = not self.usable and any(replica.adapters is None for replica in self.replicas)
        return is_unknown or any(adapter in (replica.adapters or {}) for replica in self.replicas)

    def choose(
        self,
        like: Traits | None = None,
        adapter: AdapterRef | None = None,
        routing_key: RoutingKey | None = None,
    ) -> Replica:
        """Returns the replica that should run a prompt. It has `adapter`, and is silent only if all replicas are.

        `like`: required traits, which are only preferred if different targets are allowed. `routing_key`: chooses among
        the remaining replicas. Raises UnavailableError if there is none.
        """
        replica = self.find(like, adapter, routing_key)
        if replica is None:
            replica = self._chosen_of(self.usable, like, adapter, routing_key)
        if replica is None:
            raise self.nobody()
        return replica

    def find(
        self,
        like: Traits | None,
        adapter: AdapterRef | None = None,
        routing_key: RoutingKey | None = None,
        avoided: Collection[Replica] = (),
    ) -> Replica | None:
        """Returns the replica that `choose` would return, but no silent or `avoided` one.

        Returns None if there is none.
        """
        answering = [replica for replica in self.usable if not replica.is_silent and replica not in avoided]
        return self._chosen_of(answering, like, adapter, routing_key)

    def _chosen_of(
        self,
        replicas: Sequence[Replica],
        like: Traits | None,
        adapter: AdapterRef | None,
        routing_key: RoutingKey | None,
    ) -> Replica | None:
        usable = [replica for replica in replicas if replica.has(adapter)]
        alike = [replica for replica in usable if like in (None, replica.traits)]
        candidates = alike if self._reference is not None else alike or usable
        if routing_key is None:
            return min(candidates, key=lambda replica: replica.load, default=None)
        return CHOICES[self.routing](routing_key, candidates)

    async def wait_for(
        self,
        like: Traits | None,
        timeout: float,  # noqa: ASYNC109
        adapter: AdapterRef | None = None,
        routing_key: RoutingKey | None = None,
    ) -> Replica:
        """Waits until `find` returns a replica. Raises UnavailableError after `timeout` seconds.

        A moved request is not sent to a silent replica.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while (replica := self.find(like, adapter, routing_key)) is None:
                    await self._changed.wait()
                return replica
        raise self.nobody()

    async def wait_out_change(self) -> None:
        """Waits while no replica is usable, but one may become usable soon.

        If the last usable replica went less than _CHANGE_TIMEOUT_S seconds ago, waits until that time is over: a
        rolling update can end it before its successor is known. Otherwise waits for the first poll of new replicas, for
        the same time at most.
        """
        lost_at = self._retry_after.lost_at
        seconds = 0.0 if lost_at is None else lost_at + _CHANGE_TIMEOUT_S - time.monotonic()
        was_lost = seconds > 0.0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds if was_lost else _CHANGE_TIMEOUT_S):
                while not self.usable and (was_lost or any(replica.is_new for replica in self.replicas)):
                    await self._changed.wait()

    async def _follow(self, has_begun: asyncio.Event) -> None:
        """Follows the endpoints until cancelled. If they end, the last list stays."""
        try:
            async for addresses in self._endpoints:
                added = self._update(addresses)
                if not has_begun.is_set():  # the router starts serving after its targets have answered
                    await asyncio.gather(*(replica.poll() for replica in added))
                    has_begun.set()
                for replica in added:
                    self._polls[replica] = asyncio.create_task(replica.poll_forever())
        except Exception:
            logger.exception("the targets' addresses are no longer followed")

    def _update(self, addresses: Sequence[str]) -> list[Replica]:
        """Replaces `replicas` by those at `addresses`. Returns the new ones."""
        present = {replica.address: replica for replica in self.replicas}
        added = {
            address: Replica(address, self._tokenizer_fingerprint, self._object_to, self._notify, self._dialer)
            for address in addresses
            if address not in present
        }
        self.replicas = tuple((present | added)[address] for address in addresses)
        for address in present.keys() - set(addresses):
            logger.info("target %s is no longer listed", address)
            leaving = asyncio.create_task(self._let_go(present[address]))
            self._tasks.add(leaving)
            leaving.add_done_callback(self._tasks.discard)
        self._notify()
        return list(added.values())

    async def _let_go(self, replica: Replica) -> None:
        """Closes `replica` after its last call.

        It is polled until then, so that its calls end if it is lost.
        """
        await replica.wait_idle()
        self._polls.pop(replica).cancel()
        await replica.close()

    def _object_to(self, replica: Replica) -> str | None:
        if self._reference is None:
            return None
        others = [other for other in self.replicas if other is not replica]
        return self._reference.objection(
            replica.traits,
            usable=[other.traits for other in others if other.problem is None],
            listed=[other.traits for other in others],
        )

    def nobody(self) -> UnavailableError:
        """Returns the error for a request that no replica can serve now."""
        error = UnavailableError(f"{_NO_TARGET} ({self.outline()})")
        error.retry_after = self.retry_after
        return error

    def outline(self) -> str:
        """Returns how many replicas have which status, without addresses."""
        counts = Counter(replica.status for replica in self.replicas)
        return ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "no targets"

    def _notify(self) -> None:
        self._retry_after.note(has_target=bool(self.usable), now=time.monotonic())
        self._changed.set()
        self._changed = asyncio.Event()


@functools.lru_cache(maxsize=16)
def _fingerprint(traits: tuple[tuple[str, str], ...]) -> str:
    return f"fp_{hashlib.sha256(json.dumps(traits).encode()).hexdigest()[:12]}"
