"""Rendezvous hashing (Thaler and Ravishankar 1998): programs agree on a place for a key without common state.

Each program chooses the place with the highest rank. If a place joins or leaves, only its share of the keys moves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

MAX_KEY_BYTES = hashlib.blake2b.MAX_KEY_SIZE
# A place gets no more sequences than this many times the mean. With 1.25 later turns find 3 % less of their prompts in
# a target's cache; without a bound a target gets twice the mean if all prompts begin alike (`bench.affinity`).
_MAX_IMBALANCE = 1.5

P = TypeVar("P")


def rendezvous_rank(key: bytes, address: str) -> bytes:
    """Returns the rank of the place at `address` for `key`. `key` has at most `MAX_KEY_BYTES` bytes."""
    return hashlib.blake2b(address.encode(), key=key, digest_size=8).digest()


def within_bound(places: Sequence[P], load: Callable[[P], int]) -> list[P]:
    """Returns those of `places` that may get another sequence, the least loaded in any case.

    The bound keeps a hash from filling one place: consistent hashing with bounded loads (Mirrokni et al. 2018).
    `load` returns the number of sequences at a place.
    """
    most = _MAX_IMBALANCE * (1 + sum(map(load, places)))
    return [place for place in places if load(place) * len(places) < most]
