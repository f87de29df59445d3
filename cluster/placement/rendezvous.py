"""Rendezvous hashing (Thaler and Ravishankar 1998): many choosers agree on a place for a key without common state.

The place with the highest rank is chosen. If a place joins or leaves, only its own share of the keys changes places.
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
    """Returns the rank of the place at `address` for `key`, which has at most `MAX_KEY_BYTES` bytes."""
    return hashlib.blake2b(address.encode(), key=key, digest_size=8).digest()


def within_bound(places: Sequence[P], load: Callable[[P], int]) -> list[P]:
    """Returns those of `places` that may get another sequence, the least loaded in any case.

    The bound keeps a hash from filling one place: consistent hashing with bounded loads (Mirrokni et al. 2018).
    `load` returns the number of sequences at a place.
    """
    most = _MAX_IMBALANCE * (1 + sum(map(load, places)))
    return [place for place in places if load(place) * len(places) < most]
