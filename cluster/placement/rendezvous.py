"""Rendezvous hashing (Thaler and Ravishankar 1998): many choosers agree on a place for a key without common state.

The place with the highest rank is chosen. If a place joins or leaves, only its own share of the keys changes places.
"""

from __future__ import annotations

import hashlib

MAX_KEY_BYTES = hashlib.blake2b.MAX_KEY_SIZE


def rendezvous_rank(key: bytes, address: str) -> bytes:
    """Returns the rank of the place at `address` for `key`, which has at most `MAX_KEY_BYTES` bytes."""
    return hashlib.blake2b(address.encode(), key=key, digest_size=8).digest()
