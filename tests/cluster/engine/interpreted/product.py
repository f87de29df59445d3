"""Products in a fixed order are those of PyTorch, and a row has the same bits at every height and in every tile."""

from __future__ import annotations

import itertools

import pytest
import torch

from cluster.engine.gpu_kernels.product import PackedWeight, product, product_by_tiles
from cluster.engine.gpu_kernels.product_tiles import TILES, choose_tile, num_parts, uses_programs_of_parts
from cluster.engine.quantization import Quantization, QuantizedWeight, quantize
from tests.interpreter import spare_bookkeeping
from tests.interpreter_dot import dot_in_order
from tests.soak import length

ERRORS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # of values of about 1
NUM_ROWS = (1, 3, 17, 65, 130)
SHAPES = ((128, 64), (200, 96), (77, 1031), (1, 5))  # outputs and inputs of a weight
PRODUCTS = list(itertools.product(SHAPES, NUM_ROWS, ERRORS, (False, True)))
# At least one of these cases has each pair of values of two parameters.
PAIRS = [
    (shape, num_rows, list(ERRORS)[(i + j) % 3], (i + j) % 2 == 0)
    for i, shape in enumerate(SHAPES)
    for j, num_rows in enumerate(NUM_ROWS)
]
HEIGHTS = length((1, 17, 65), (*range(1, 18), 31, 32, 33, 47, 63, 64, 65, 128, 129))


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    spare_bookkeeping(monkeypatch)
    dot_in_order(monkeypatch)


def operands(
    num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns x, weight and bias; outputs are about 1."""
    generator = torch.Generator().manual_seed(num_rows + num_inputs)
    x = torch.randn(num_rows, num_inputs, generator=generator)
    weight = torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs**0.5
    return x.to(dtype), weight.to(dtype), torch.randn(num_outputs, generator=generator).to(dtype)


@pytest.mark.parametrize(("shape", "num_rows", "dtype", "has_bias"), length(PAIRS[::2], PRODUCTS), ids=str)
def test_it_is_the_product(shape: tuple[int, int], num_rows: int, dtype: torch.dtype, has_bias: bool) -> None:
    x, weight, bias = operands(num_rows, *shape, dtype)
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    found = product(x, weight, bias if has_bias else None)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=ERRORS[dtype], atol=ERRORS[dtype])


def test_no_rows() -> None:
    _, weight, bias = operands(1, 24, 32, torch.float32)
    assert product(torch.empty(0, 32), weight, bias).shape == (0, 24)


def test_rows_that_are_part_of_a_larger_tensor() -> None:
    x, weight, _ = operands(6, 24, 32, torch.float32)
    wide = torch.cat([x, x.flip(0)], dim=1)
    assert torch.equal(product(wide[:, :32], weight), product(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_at_every_height(dtype: torch.dtype) -> None:
    """The inputs are cut into four parts, the last one shorter."""
    x, weight, bias = operands(150, 72, 1100, dtype)
    assert num_parts(*weight.shape) == 4
    whole = product(x, weight, bias)
    for num_rows in HEIGHTS:
        assert torch.equal(product(x[:num_rows], weight, bias), whole[:num_rows])
        assert torch.equal(product(x[-num_rows:], weight, bias), whole[-num_rows:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), length([(72, 1100)], [(72, 1100), (130, 2048), (130, 64)]))
def test_neither_the_tile_nor_the_programs_decide_a_bit(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    x, weight, bias = operands(70, num_outputs, num_inputs, dtype)
    whole = product(x, weight, bias)
    for tile in TILES[dtype.itemsize]:
        for is_split in (False, True):
            assert torch.equal(product_by_tiles(x, weight, bias, tile, is_split=is_split), whole)


QUANTIZATIONS = [
    (8, None, 192),
    (8, None, 96),
    (8, 32, 192),
    (4, 32, 544),
    (4, 64, 192),
    (4, 128, 256),
]  # bits, group, inputs


def quantized(bits: int, group_size: int | None, num_inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Returns x, the dequantized weight, the bias, and the quantized weight."""
    x, weight, bias = operands(70, 72, num_inputs, dtype)
    stored = quantize(weight, Quantization(bits, group_size))
    exact = QuantizedWeight(stored.values, stored.scales.to(dtype).float(), stored.bits, dtype)
    return x, exact.dequantize(), bias, exact


# The kernel reads integers alike for both types, and float32 takes the interpreter twice as long.
@pytest.mark.parametrize(
    ("bits", "group_size", "num_inputs", "dtype"),
    [
        *((*quantization, torch.bfloat16) for quantization in length(QUANTIZATIONS[2:4], QUANTIZATIONS)),
        *((*quantization, torch.float32) for quantization in length([(4, 64, 192)], QUANTIZATIONS)),
    ],
    ids=str,
)
def test_integers_are_multiplied_as_they_are_read(
    bits: int, group_size: int | None, num_inputs: int, dtype: torch.dtype
) -> None:
    x, weight, bias, stored = quantized(bits, group_size, num_inputs, dtype)
    packed = PackedWeight.of(stored)
    assert packed is not None
    assert packed.shape == weight.shape
    assert packed.values.nbytes == weight.numel() * bits // 8
    whole = product(x, packed, bias)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(whole.double(), expected, rtol=ERRORS[dtype], atol=ERRORS[dtype])
    for num_rows in length((17,), (1, 17, 65)):
        assert torch.equal(product(x[:num_rows], packed, bias), whole[:num_rows])
    for tile in TILES[dtype.itemsize]:
        for is_split in (False, True):
            assert torch.equal(product_by_tiles(x, packed, bias, tile, is_split=is_split), whole)


@pytest.mark.parametrize(("bits", "group_size", "num_inputs"), [(8, None, 72), (4, 24, 96)])
def test_groups_that_are_not_whole_blocks_are_left_to_pytorch(
    bits: int, group_size: int | None, num_inputs: int
) -> None:
    assert PackedWeight.of(quantized(bits, group_size, num_inputs, torch.bfloat16)[-1]) is None


def test_parts_depend_on_the_shape_of_the_weight_alone() -> None:
    shapes = {(6144, 4096): 4, (4096, 4096): 4, (28_672, 4096): 1, (4096, 14_336): 4, (128_256, 4096): 1, (64, 256): 1}
    assert {shape: num_parts(*shape) for shape in shapes} == shapes


def test_few_tiles_have_a_program_for_every_part() -> None:
    few, many = choose_tile(16, 2), choose_tile(2048, 2)
    assert uses_programs_of_parts(few, 16, 4096, 4)
    assert not uses_programs_of_parts(many, 2048, 4096, 4)
    assert not uses_programs_of_parts(few, 16, 4096, 1)
