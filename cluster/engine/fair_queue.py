"""Sequences that wait for a place, in an order that shares the target among the owners of requests.

A sequence takes a share of the target: of its places or of its KV cache, whichever is larger (the dominant share of
Ghodsi and others, "Dominant resource fairness", 2011). The next sequence is one of the owner whose running sequences
have the smallest share in all. If there is no room for it, an owner with much more gives a sequence back.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    @property
    def priority(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_preemptions(self) -> int: ...


T = TypeVar("T", bound=Waiting)


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    priority: int
    number: int  # in the order of arrival; negative: after a preemption
    owner: bytes
    sequence: T

    @property
    def place(self) -> tuple[int, int]:
        """Place among those of the same owner."""
        return self.priority, self.number


class FairQueue(Generic[T]):
    """`priority` orders an owner's sequences, the lowest value first.

    Those without an owner (b"") are as of one owner among the others, except that a priority below 0 puts a sequence
    before those of all owners, and one above 0 after them.
    """

    def __init__(self, owner_of: Callable[[T], bytes], num_places: int, num_kv_tokens: int) -> None:
        self._owner_of = owner_of
        self._num_places = num_places
        self._num_kv_tokens = num_kv_tokens
        self._queues: dict[bytes, list[_Entry[T]]] = {}  # none is empty
        self._arrivals = itertools.count(1)
        self._returns = itertools.count(-1, -1)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[T]:
        """Yields the sequences as they are now, by owner. Thread-safe."""
        yield from [entry.sequence for queue in list(self._queues.values()) for entry in list(queue)]

    def add(self, sequence: T, *, is_first: bool = False) -> None:
        """`is_first`: before all others of the same owner and priority."""
        number = next(self._returns if is_first else self._arrivals)
        owner = self._owner_of(sequence)
        entry = _Entry(sequence.priority, number, owner, sequence)
        bisect.insort(self._queues.setdefault(owner, []), entry, key=lambda entry: entry.place)

    def remove(self, sequences: Collection[T]) -> int:
        """Removes those of `sequences` that wait. Returns how many these were."""
        num_before = len(self)
        for owner, queue in list(self._queues.items()):
            kept = [entry for entry in queue if entry.sequence not in sequences]
            if kept:
                self._queues[owner] = kept
            else:
                del self._queues[owner]
        return num_before - len(self)

    def first(self, running: Sequence[T]) -> T:
        """Returns the sequence that starts next."""
        return self._first(running).sequence

    def take(self, first: T) -> None:
        """Removes `first`, the result of `first`."""
        owner = self._owner_of(first)
        queue = self._queues[owner]
        assert queue[0].sequence is first
        queue.pop(0)
        if not queue:
            del self._queues[owner]

    def in_order(self, running: Sequence[T]) -> Iterator[T]:
        """Yields the sequences in the order in which they would start if none ended. Thread-safe."""
        shares = self._shares(running)
        order = self._order(shares)
        queues = [iter(list(queue)) for queue in list(self._queues.values())]
        heads = [(order(entry), entry, queue) for queue in queues if (entry := next(queue, None)) is not None]
        heapq.heapify(heads)
        while heads:
            _, entry, queue = heads[0]
            yield entry.sequence
            shares[entry.owner] += self._share(entry.sequence)
            if (following := next(queue, None)) is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (order(following), following, queue))

    def who_yield(self, running: Sequence[T], is_enough: Callable[[Sequence[T]], bool]) -> Sequence[T]:
        """Returns the running sequences that give their room to the first one that waits: as few as are enough.

        `is_enough` stays true if further sequences yield. Returns none if all that may yield are not enough. An owner
        that yields keeps at least as much as the other one then has. The present share of the other one counts twice
        for this, so that equal owners do not take places from each other in turn. Of an owner's sequences those yield
        first that have been preempted least.
        """
        if not self._queues:
            return ()
        first = self._first(running)
        others = [
            sequence
            for sequence in running
            if self._owner_of(sequence) != first.owner and self.urgency(sequence) >= self.urgency(first.sequence)
        ]
        shares, may_yield = self._shares(running), list[T]()
        least_kept = 2 * shares[first.owner] + self._share(first.sequence)
        for sequence in self._from_last(others, lambda sequence: -sequence.num_preemptions):
            owner = self._owner_of(sequence)
            kept = shares[owner] - self._share(sequence)
            if kept >= least_kept:
                shares[owner] = kept
                may_yield.append(sequence)
        if not may_yield or not is_enough(may_yield):
            return ()
        numbers = range(1, len(may_yield))
        yielding = may_yield[: 1 + bisect.bisect_left(numbers, True, key=lambda n: is_enough(may_yield[:n]))]
        for sequence in yielding[:-1]:  # without the last one the others are not enough
            others = [other for other in yielding if other is not sequence]
            if is_enough(others):
                yielding = others
        return yielding

    def from_last(self, running: Sequence[T]) -> Iterator[T]:
        """Yields `running` in the order in which they are preempted if there is no room for all of them to grow.

        The least urgent come first, and among these those of the owner who then has most; of an owner's sequences
        those of the lowest priority, and among these the last one.
        """
        return self._from_last(running, lambda _: 0)

    def _from_last(self, running: Sequence[T], preference: Callable[[T], int]) -> Iterator[T]:
        """`preference`: order of sequences of one owner and priority, the highest value first."""
        own: defaultdict[tuple[int, bytes], list[tuple[int, int, int]]] = defaultdict(list)
        shares: defaultdict[tuple[int, bytes], float] = defaultdict(float)
        for index, sequence in enumerate(running):
            group = self.urgency(sequence), self._owner_of(sequence)
            own[group].append((sequence.priority, preference(sequence), index))
            shares[group] += self._share(sequence)
        for of_group in own.values():
            of_group.sort()
        heads = [(-group[0], -shares[group], number, group) for number, group in enumerate(own)]
        heapq.heapify(heads)
        while heads:
            urgency, _, number, group = heads[0]
            *_, index = own[group].pop()
            shares[group] -= self._share(running[index])
            if own[group]:
                heapq.heapreplace(heads, (urgency, -shares[group], number, group))
            else:
                heapq.heappop(heads)
            yield running[index]

    def urgency(self, sequence: T) -> int:
        """Returns the order of `sequence` among all owners', the lowest value first."""
        return 0 if self._owner_of(sequence) else sequence.priority

    def _first(self, running: Sequence[T]) -> _Entry[T]:
        if len(self._queues) == 1:
            (queue,) = self._queues.values()
            return queue[0]
        return min((queue[0] for queue in self._queues.values()), key=self._order(self._shares(running)))

    def _order(self, shares: Mapping[bytes, float]) -> Callable[[_Entry[T]], tuple[int, float, int]]:
        return lambda entry: (self.urgency(entry.sequence), shares[entry.owner], entry.number)

    def _shares(self, running: Iterable[T]) -> defaultdict[bytes, float]:
        shares: defaultdict[bytes, float] = defaultdict(float)
        for sequence in running:
            shares[self._owner_of(sequence)] += self._share(sequence)
        return shares

    def _share(self, sequence: T) -> float:
        return max(1 / self._num_places, sequence.num_tokens / self._num_kv_tokens)
