from __future__ import annotations

import numpy as np
import pytest
import torch

from cluster.speculation.device_noise import gumbel_noise_on
from cluster.speculation.noise import NoiseKey, gumbel_noise


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 4096, 10_007])
def test_it_is_the_shared_noise(num_tokens: int) -> None:
    rng = np.random.default_rng(7)
    keys = [NoiseKey.derive(int(seed), index) for index, seed in enumerate(rng.integers(-(2**63), 2**63, 6))]
    draws = [(key, int(position)) for key, position in zip(keys, rng.integers(0, 2**31, 6), strict=True)]
    draws += [(NoiseKey(0, 0), 0), (NoiseKey(2**64 - 1, 2**64 - 1), 2**40)]
    ours, theirs = gumbel_noise_on(torch.device("cpu"), draws, num_tokens).numpy(), gumbel_noise(draws, num_tokens)
    # Bit for bit but where the libraries' logarithms differ: by a last place of a float64, which shows in a float32
    # once in 2**28 numbers or so.
    assert (ours != theirs).sum() <= 1
    np.testing.assert_allclose(ours, theirs, rtol=1.2e-7)
