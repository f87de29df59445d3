"""Hashes for tokens and chances: the model of simulated engines."""

from __future__ import annotations

from cluster.speculation.noise import NoiseKey

_MASK = 2**64 - 1


def token_at(key: NoiseKey, position: int, vocab_size: int) -> int:
    """Returns the token that the simulated target chooses at `position`, after any prefix."""
    return _hash(key.low ^ position) % vocab_size


def uniform_at(key: NoiseKey, position: int, rank: int = 0) -> float:
    """Returns a number in [0, 1), independent of the token and of the numbers of other ranks."""
    return _hash(key.high ^ position ^ rank << 48) / 2**64


def _hash(number: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _MASK
    return number ^ number >> 31
