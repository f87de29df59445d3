"""Every Triton kernel compiles for every architecture, without spills to speak of, and fits into its shared memory."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton")

from bench.gpu_resources import CAPABILITIES, Kernel, kernels, resources
from tests.soak import length

SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # that a program may have
KERNELS = list(kernels())
SOME = [one for one in CAPABILITIES if one != 86]  # 8.6 has the limits of 8.9
# The short run compiles each kernel for one architecture only, and takes the architectures in turn.
CASES = length(
    [(kernel, SOME[number % len(SOME)]) for number, kernel in enumerate(KERNELS)],
    list(itertools.product(KERNELS, CAPABILITIES)),
)


@pytest.mark.parametrize(
    ("kernel", "capability"), CASES, ids=[f"{kernel.name}-{capability}" for kernel, capability in CASES]
)
def test_it_compiles(kernel: Kernel, capability: int) -> None:
    found = resources(kernel, capability)
    assert found.spilled_bytes <= (32 if "float32" in kernel.name else 0)  # which nobody serves with on a GPU
    assert found.shared_bytes <= SHARED_BYTES[capability]
    assert 0 < found.registers <= 255
