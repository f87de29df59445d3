"""Compares the kernels of norm, rotation and gate with PyTorch's operators.

In float32 rotations are equal bit for bit. The interpreter rounds to bfloat16 towards zero, PyTorch to the nearest.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cluster.engine.batch import Segment, pack
from cluster.engine.gpu_kernels.gate import gated
from cluster.engine.gpu_kernels.norm import add_and_norm
from cluster.engine.gpu_kernels.rotation import rotate_and_write
from tests.cluster.engine.filled_caches import BLOCK_SIZE, CPU
from tests.interpreter import spare_bookkeeping

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    spare_bookkeeping(monkeypatch)


def random(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close_to(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 2e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}


def normed_by_pytorch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * F.rms_norm(x.float(), x.shape[-1:], eps=1e-5).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 24, 512, 1000])
def test_norm_of_a_sum(length: int, dtype: torch.dtype) -> None:
    shapes = (5, length), (5, length), (length,)
    x, addend, weight = (random(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes))
    for added in (None, addend):
        total, normed = add_and_norm(x, added, weight, 1e-5)
        expected = x if added is None else x + added
        torch.testing.assert_close(total, expected, **close_to(dtype))
        torch.testing.assert_close(normed, normed_by_pytorch(expected, weight), **close_to(dtype))
    assert [tensor.shape for tensor in add_and_norm(x[:0], addend[:0], weight, 1e-5)] == [(0, length)] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("head_dim", [8, 24])
def test_rotated_heads_and_what_is_written(head_dim: int, has_norm: bool, dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, num_slots = 4, 2, 16 * BLOCK_SIZE
    batch = pack([Segment([1, 2, 3], 5, [4, 9], 1), Segment([4], 0, [11], 1)], BLOCK_SIZE, CPU)
    qkv = random(1, 4, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    head_norm = random(2, num_heads + num_kv_heads, head_dim, dtype=dtype) if has_norm else None
    turns = random(3, 20, head_dim // 2, dtype=torch.float32)
    angles = turns.cos().to(dtype), turns.sin().to(dtype)
    keys, values = (random(seed, num_slots, num_kv_heads, head_dim, dtype=dtype) for seed in (4, 5))
    expected_keys, expected_values = keys.clone(), values.clone()
    query = rotate_and_write(qkv, head_norm, angles, batch, keys, values, 1e-5)

    heads = qkv.view(4, -1, head_dim)
    to_rotate = heads[:, : num_heads + num_kv_heads]
    if head_norm is not None:
        to_rotate = normed_by_pytorch(to_rotate, head_norm)
    cosines, sines = (table[batch.positions][:, None] for table in angles)
    first, second = to_rotate.chunk(2, dim=-1)
    rotated = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
    expected_keys[batch.slots] = rotated[:, num_heads:]
    expected_values[batch.slots] = heads[:, num_heads + num_kv_heads :]
    assert torch.equal(values, expected_values)
    for found, expected in ((query, rotated[:, :num_heads]), (keys, expected_keys)):
        torch.testing.assert_close(found, expected, **close_to(dtype))
        assert has_norm or dtype == torch.bfloat16 or torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("length", "has_gelu"), [(3, True), (1024, False), (1500, True)])
def test_gates(length: int, has_gelu: bool, dtype: torch.dtype) -> None:
    gate_up = 4.0 * random(1, 3, 2 * length, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    activated = F.gelu(gate, approximate="tanh") if has_gelu else F.silu(gate)
    torch.testing.assert_close(gated(gate_up, has_gelu=has_gelu), activated * up, **close_to(dtype))
    assert gated(gate_up[:0]).shape == (0, length)
