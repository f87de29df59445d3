from __future__ import annotations

import itertools

from cluster.simulated_engines.tokens import token_at, uniform_at
from cluster.speculation.noise import NoiseKey


def test_the_hash_is_that_of_the_published_generator():
    """SplitMix64 with seed 0 begins with e220a8397b1dcdaf."""
    assert token_at(NoiseKey(0, 0), 0, 2**64) == 0xE220A8397B1DCDAF


def test_uniform_numbers_are_uniform():
    """Pearson's chi-square over 16 cells; 37.7 is exceeded by one in a thousand."""
    counts = [0] * 16
    for seed, position in itertools.product(range(40), range(400)):
        counts[int(16 * uniform_at(NoiseKey.derive(seed, 0), position))] += 1
    assert sum((count - 1000) ** 2 / 1000 for count in counts) < 37.7
