"""Products by every set of instructions: right, the same for a row in every company, and chosen as they should be."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from cluster.engine.cpu_kernels import VARIABLE, InstructionSet, has_kernels, instruction_set
from cluster.engine.cpu_linear import KernelLinear
from cluster.engine.quantization import Quantization, QuantizedWeight, quantize
from cluster.errors import ConfigurationError

from .instruction_sets import INSTRUCTION_SETS

needs_kernels = pytest.mark.skipif(not has_kernels(), reason="the kernels do not run here")
every_set = pytest.mark.parametrize("using", INSTRUCTION_SETS)

QUANTIZATIONS = {
    "bfloat16": None,
    "int8": Quantization(8, None),
    "int4": Quantization(4, 32),
    "int4 in large groups": Quantization(4, 96),
    "int4 in groups that fill no block": Quantization(4, 16),
    "int4 in odd groups": Quantization(4, 3),
}
every_format = pytest.mark.parametrize("name", QUANTIZATIONS)
MOST_ROWS = 130
ROWS = (0, 1, 2, 7, 8, 9, 12, 13, 15, 16, 17, 24, 25, 31, 32, 33, 47, 48, 49, 64, 65, MOST_ROWS)
UNIT = 2.0**-24  # of rounding in float32
SMALLEST = torch.finfo(torch.float32).tiny  # of normal numbers; a smaller product may become 0


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_weight(name: str, out_features: int, in_features: int) -> torch.Tensor | QuantizedWeight:
    weight, quantization = randn(1, out_features, in_features).bfloat16(), QUANTIZATIONS[name]
    return weight if quantization is None else quantize(weight, quantization)


def as_float64(weight: torch.Tensor | QuantizedWeight) -> torch.Tensor:
    """Exactly what the weight stands for."""
    if isinstance(weight, torch.Tensor):
        return weight.double()
    return weight.values.double() * weight.scales.double().repeat_interleave(weight.group_size, dim=1)


def assert_product(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Each of in_features products and additions, three more for a scale or a bias, is off by a unit at most."""
    num_roundings = 2 * x.shape[1] + 3
    largest = x.double().abs() @ weight.abs().T + bias.abs()
    error = (y.double() - (x.double() @ weight.T + bias)).abs()
    assert (error <= num_roundings * (UNIT * largest + SMALLEST)).all()


@every_set
class TestProducts:
    @every_format
    @pytest.mark.parametrize(("out_features", "in_features"), [(1, 96), (31, 192), (32, 96), (33, 288), (100, 96)])
    def test_in_every_format(self, using: InstructionSet, name: str, out_features: int, in_features: int) -> None:
        weight, bias = make_weight(name, out_features, in_features), randn(2, out_features)
        linear = KernelLinear(weight, bias, using)
        for num_rows in ROWS:
            x = randn(num_rows, num_rows, in_features)
            seen = x if using is InstructionSet.PORTABLE else x.bfloat16()
            assert_product(linear(x), seen, as_float64(weight), bias.double())

    @pytest.mark.parametrize("in_features", [2, 31, 33, 37, 63, 65, 130])
    @pytest.mark.parametrize("name", ["bfloat16", "int8"])
    def test_with_inputs_that_fill_no_block(self, using: InstructionSet, name: str, in_features: int) -> None:
        weight, bias = make_weight(name, 40, in_features), torch.zeros(40)
        linear = KernelLinear(weight, None, using)
        for num_rows in (1, 5, 17, 40):
            x = randn(num_rows, num_rows, in_features).bfloat16()
            assert_product(linear(x.float()), x, as_float64(weight), bias.double())

    @every_format
    def test_every_weight_is_in_its_place(self, using: InstructionSet, name: str) -> None:
        """A one-hot row yields exactly the weights of its input."""
        weight = make_weight(name, 70, 192)
        expected = (weight.float() if isinstance(weight, torch.Tensor) else weight.dequantize()).T
        assert torch.equal(KernelLinear(weight, None, using)(torch.eye(192)), expected)

    @pytest.mark.parametrize("bits", [8, 4])
    def test_every_integer_is_exact(self, using: InstructionSet, bits: int) -> None:
        half = 2 ** (bits - 1)
        values = torch.arange(-half, half, dtype=torch.int8).repeat(3, 32 // bits)
        weight = QuantizedWeight(
            values, torch.tensor([[1.0], [0.375], [2.0**-20]]), 8 if bits == 8 else 4, torch.bfloat16
        )
        in_features = values.shape[1]
        assert torch.equal(KernelLinear(weight, None, using)(torch.eye(in_features)), weight.dequantize().T)

    def test_special_values_pass_through(self, using: InstructionSet) -> None:
        weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [3e38, 3e38]], dtype=torch.bfloat16)
        y = KernelLinear(weight, None, using)(torch.tensor([[torch.nan, 1.0], [torch.inf, 2.0], [1.0, 1.0]]))
        assert y[0].isnan().all()
        assert y[1, 0] == torch.inf
        assert y[2].tolist() == [1.0, 1.0, torch.inf]


@every_set
class TestCompany:
    @every_format
    def test_a_row_has_the_same_bits_beside_any_others(
        self, using: InstructionSet, name: str, num_threads: int
    ) -> None:
        linear = KernelLinear(make_weight(name, 70, 96), randn(2, 70), using)
        x = randn(3, MOST_ROWS, 96)
        together = linear(x)
        for num_rows in range(1, MOST_ROWS + 1):
            assert torch.equal(linear(x[:num_rows]), together[:num_rows])
        for num_rows in (1, 2, 5, 7, 11, 16, 31):
            for first in range(0, MOST_ROWS - num_rows, 13):
                rows = slice(first, first + num_rows)
                assert torch.equal(linear(x[rows]), together[rows])

    def test_threads_make_no_difference(self, using: InstructionSet) -> None:
        linear, x, results = KernelLinear(make_weight("int4", 500, 96), None, using), randn(3, 40, 96), []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(linear(x))
        torch.set_num_threads(1)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])

    def test_callers_do_not_disturb_each_other(self, using: InstructionSet) -> None:
        """Calls have different numbers of rows, so that each configures its own tiles."""
        torch.set_num_threads(2)
        linear = KernelLinear(make_weight("bfloat16", 320, 64), None, using)
        repeats = 20 if using is InstructionSet.AMX_EMULATED else 1000
        wrong: list[int] = []

        def call(num_rows: int) -> None:
            x = randn(num_rows, num_rows, 64)
            expected = linear(x)
            wrong.extend(num_rows for _ in range(repeats) if not torch.equal(linear(x), expected))

        callers = [threading.Thread(target=call, args=(num_rows,)) for num_rows in (3, 16, 21)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        torch.set_num_threads(1)
        assert not wrong


@pytest.mark.skipif(not InstructionSet.AMX.is_supported, reason="no tiles to compare with")
class TestEmulation:
    @every_format
    def test_it_gives_the_bits_that_tiles_give(self, name: str) -> None:
        weight, bias = make_weight(name, 70, 192), randn(2, 70)
        real, emulated = (
            KernelLinear(weight, bias, using) for using in (InstructionSet.AMX, InstructionSet.AMX_EMULATED)
        )
        for num_rows in (1, 9, 16, 17, 40):
            x = randn(num_rows, num_rows, 192)
            assert torch.equal(real(x), emulated(x))

    @pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-20, 1e20, 1e30, 3e38])
    def test_of_very_small_and_very_large_numbers_too(self, scale: float) -> None:
        """Where sums overflow, and where numbers are too small to be normal, or their products are."""
        weight, x = (scale * randn(1, 40, 96)).bfloat16(), randn(2, 20, 96)
        real, emulated = (
            KernelLinear(weight, None, using) for using in (InstructionSet.AMX, InstructionSet.AMX_EMULATED)
        )
        for factor in (1e-30, 1e-18, 1.0, 1e10):
            torch.testing.assert_close(real(factor * x), emulated(factor * x), rtol=0, atol=0, equal_nan=True)


@needs_kernels
class TestChoice:
    def test_the_best_there_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(VARIABLE, raising=False)
        real = [choice for choice in InstructionSet if choice is not InstructionSet.AMX_EMULATED]
        assert instruction_set(torch.bfloat16) is max(choice for choice in real if choice.is_supported)

    @pytest.mark.parametrize("using", INSTRUCTION_SETS)
    def test_the_environment_forces_one(self, using: InstructionSet, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VARIABLE, using.name.lower())
        assert instruction_set(torch.bfloat16) is using
        weight = make_weight("int4", 40, 96)
        x = randn(3, 5, 96)
        assert torch.equal(KernelLinear(weight)(x), KernelLinear(weight, None, using)(x))

    def test_float32_stays_float32(self) -> None:
        assert instruction_set(torch.float32) is InstructionSet.PORTABLE
        weight, x = randn(1, 40, 96), randn(2, 5, 96)
        for exact in (weight, quantize(weight, Quantization(8, None))):
            assert torch.equal(KernelLinear(exact)(x), KernelLinear(exact, None, InstructionSet.PORTABLE)(x))

    @pytest.mark.parametrize("name", ["avx2", "AMX"])
    def test_an_unknown_name_is_refused(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VARIABLE, name)
        with pytest.raises(ConfigurationError, match="one of none, portable, avx512_bf16, amx, amx_emulated"):
            instruction_set(torch.bfloat16)

    def test_what_the_processor_lacks_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(InstructionSet, "is_supported", property(lambda choice: choice is InstructionSet.PORTABLE))
        monkeypatch.setenv(VARIABLE, "amx")
        with pytest.raises(ConfigurationError, match="this processor lacks it"):
            instruction_set(torch.bfloat16)
        with pytest.raises(ValueError, match="AMX is not supported here"):
            KernelLinear(make_weight("bfloat16", 32, 32), None, InstructionSet.AMX)
        monkeypatch.delenv(VARIABLE)
        assert instruction_set(torch.bfloat16) is InstructionSet.PORTABLE
