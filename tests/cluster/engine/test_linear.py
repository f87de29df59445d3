"""Every kernel computes the same product; ours gives a row the same bits whatever the other rows."""

from __future__ import annotations

import pytest
import torch

from cluster.engine.linear import KernelLinear, Linear, PackedLinear, PlainLinear, has_kernel, make_linear

KERNELS = [
    PlainLinear,
    PackedLinear,
    pytest.param(KernelLinear, marks=pytest.mark.skipif(not has_kernel(), reason="not built, or no AVX-512")),
]
SHAPES = [(1, 1), (5, 37), (24, 64), (33, 100), (97, 384)]  # out_features, in_features
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}


def random_tensors(out_features: int, in_features: int, num_rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(out_features * 1000 + num_rows)
    shapes = ((num_rows, in_features), (out_features, in_features))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_product(kernel: type[Linear], dtype: torch.dtype, out_features: int, in_features: int) -> None:
    for num_rows in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 40):
        x, weight = random_tensors(out_features, in_features, num_rows, dtype)
        y = kernel(weight)(x)  # type: ignore[call-arg]
        wanted = x.double() @ weight.double().T
        assert y.dtype == dtype
        assert torch.allclose(y.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.skipif(not has_kernel(), reason="not built, or no AVX-512")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x, weight = random_tensors(101, 200, 16, dtype)
    linear = KernelLinear(weight)
    together = linear(x)
    for first in range(16):
        for count in (1, 2, 5):
            rows = slice(first, first + count)
            assert torch.equal(linear(x[rows]), together[rows])


@pytest.mark.skipif(not has_kernel(), reason="not built, or no AVX-512")
def test_special_values_pass_through() -> None:
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [3e38, 3e38]], dtype=torch.bfloat16)
    x = torch.tensor([[torch.nan, 1.0], [torch.inf, 2.0], [1.0, 1.0]], dtype=torch.bfloat16)
    y = KernelLinear(weight)(x)
    assert y[0].isnan().all()
    assert y[1, 0] == torch.inf
    assert y[2].tolist() == [1.0, 1.0, torch.inf]


def test_rows_need_not_be_contiguous() -> None:
    x, weight = random_tensors(24, 64, 8, torch.float32)
    linear = make_linear(weight)
    assert torch.equal(linear(x[::2]), linear(x[::2].contiguous()))
