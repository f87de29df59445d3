"""Memory in huge pages holds tensors as any other does."""

from __future__ import annotations

import gc

import pytest
import torch

from cluster.engine import huge_pages


@pytest.mark.parametrize("shape", [(3, 5), (0, 7), (1024, 1024), (3, 1024, 1025)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_it_is_nought_and_keeps_what_is_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = huge_pages.zeros(shape, dtype)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
    assert not tensor.any()
    if tensor.nbytes >= 2**21:
        assert tensor.data_ptr() % 2**21 == 0  # or its first and last pages would be small ones
    expected = torch.arange(tensor.numel()).remainder(251).to(dtype).view(shape)
    row = tensor[1:2].copy_(expected[1:2])  # a view of it outlives it
    tensor.copy_(expected)
    assert torch.equal(tensor, expected)
    del tensor
    gc.collect()
    assert torch.equal(row, expected[1:2])


def test_a_kernel_without_huge_pages_gives_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmap.MADV_HUGEPAGE", 12345)  # which no kernel knows
    assert huge_pages.zeros((2048, 2048), torch.float32).sum() == 0
