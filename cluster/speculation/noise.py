"""Shared noise: Gumbel variables that are a pure function of (key, position, token).

Target and draft evaluate the same function, so they have the same noise without sending it. The generator
is Philox4x64-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011), for which
NumPy has a compiled implementation. Its 256-bit counter is

    (token // 8, position, 0, 0)        least significant 64-bit word first

One evaluation gives four 64-bit words. They are cut into the eight 32-bit words of tokens 8b .. 8b+7, the low half of
each word first. A word x becomes `v = (x + 1/2) / 2**32` and `g = -log(-log1p(-v))`, evaluated in float64 and
rounded once to float32: float32 logarithms differ between libraries, and float32 cannot represent 1 - 2**-32.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NOISE_VERSION = 1
"Incremented with every change of key, counter, words or arithmetic: after it, a seed gives other noise."

_TOKENS_PER_BLOCK = 8
_WORDS_PER_BLOCK = 4  # words have 64 bits
_COUNTER_MASK = (1 << 256) - 1


class NoiseDomain(enum.IntEnum):
    """Separates streams of noise that must be independent despite the same seed and choice."""

    CHOICE = 0  # the target's draw, and the draft's prediction of it
    DRAFT = 1  # with `acceptance: rejection`: the draft's own draw
    ACCEPTANCE = 2  # with `acceptance: rejection`: the decision to accept its token


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """The 128-bit key of a sequence's noise, as two 64-bit words."""

    low: int
    high: int

    @classmethod
    def derive(cls, seed: int, choice_index: int, domain: NoiseDomain = NoiseDomain.CHOICE) -> NoiseKey:
        """Returns H(seed, choice index, domain): BLAKE2b-128. `seed` is any int64, `choice_index` any uint32."""
        packed = struct.pack("<qIB", seed, choice_index, domain)
        digest = hashlib.blake2b(packed, digest_size=16, person=b"outrider-noise").digest()
        low, high = struct.unpack("<QQ", digest)
        return cls(low, high)

    def within(self, domain: NoiseDomain) -> NoiseKey:
        """Returns a key derived from this one, for noise that must be independent of this key's noise."""
        packed = struct.pack("<QQB", self.low, self.high, domain)
        digest = hashlib.blake2b(packed, digest_size=16, person=b"outrider-domain").digest()
        return NoiseKey(*struct.unpack("<QQ", digest))


def noise_words(key: NoiseKey, position: int, num_tokens: int) -> npt.NDArray[np.uint32]:
    """Returns the raw words of tokens 0 .. num_tokens-1 at `position`. Shape [num_tokens]."""
    # NumPy's generator increments its counter before each evaluation, so the counter starts one lower.
    counter = ((position << 64) - 1) & _COUNTER_MASK
    generator = np.random.Philox(counter=counter, key=key.high << 64 | key.low)
    num_blocks = -(-num_tokens // _TOKENS_PER_BLOCK)
    words = generator.random_raw(num_blocks * _WORDS_PER_BLOCK)
    return words.astype("<u8", copy=False).view(np.uint32)[:num_tokens]


def uniform_noise(key: NoiseKey, position: int) -> float:
    """Returns a uniform number in (0, 1)."""
    return (float(noise_words(key, position, 1)[0]) + 0.5) / 2.0**32


def gumbel_noise(draws: Sequence[tuple[NoiseKey, int]], num_tokens: int) -> npt.NDArray[np.float32]:
    """Returns standard Gumbel noise for each (key, position) of `draws`. Shape [len(draws), num_tokens].

    A row depends only on its own key and position, not on the other rows or `num_tokens`.
    """
    v = np.empty((len(draws), num_tokens), dtype=np.float64)
    for row, (key, position) in enumerate(draws):
        v[row] = noise_words(key, position, num_tokens)
    # In place, so that one buffer stays in the CPU's cache. The first two operations compute -v.
    v += 0.5
    v *= -(2.0**-32)
    np.log1p(v, out=v)
    np.negative(v, out=v)
    np.log(v, out=v)
    np.negative(v, out=v)
    return v.astype(np.float32)
