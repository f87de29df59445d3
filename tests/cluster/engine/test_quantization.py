"""Integers in place of weights: how near they are, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.engine.batch import Segment
from cluster.engine.loader import load_model
from cluster.engine.quantization import Quantization, quantize
from cluster.engine.runner import ModelRunner
from cluster.errors import ConfigurationError

CPU = torch.device("cpu")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("name", "group_size", "lowest"), [("int8", 384, -128), ("int4", 32, -8), ("int4", 128, -8)])
def test_error_is_within_a_step_of_the_scale(name: str, group_size: int, lowest: int) -> None:
    """Half a step by rounding; the largest positive value of a group may lose another half by clipping."""
    weight = randn(48, 384)
    quantized = quantize(weight, Quantization.named(name, group_size))
    assert quantized.group_size == group_size
    assert quantized.values.min() >= lowest
    assert quantized.values.max() <= -lowest - 1
    steps = quantized.scales.repeat_interleave(group_size, dim=1)
    assert ((quantized.dequantize() - weight).abs() <= 0.51 * steps + (weight > 0) * 0.5 * steps).all()


def test_inputs_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="100 inputs does not divide into groups of 32"):
        quantize(randn(4, 100), Quantization.named("int4", 32))


@pytest.mark.parametrize(("name", "tolerance"), [("int8", 0.05), ("int4", 0.6)])
def test_a_model_stays_near_its_checkpoint(name: str, tolerance: float, tiny_llama: Callable[..., Path]) -> None:
    def logits(quantization: Quantization | None) -> torch.Tensor:
        loaded = load_model(tiny_llama(), torch.float32, CPU, quantization=quantization)
        return ModelRunner(loaded, 4, 8).run([Segment(list(range(20)), 0, list(range(5)), num_logits=20)])

    exact, near = logits(None), logits(Quantization.named(name, 32))
    relative = (near - exact).norm() / exact.norm()
    assert 0 < relative < tolerance
