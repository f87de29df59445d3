"""Parts of `bench.gpu` on the CPU: small random models, and tables of measurements."""

from __future__ import annotations

import pytest
import torch

from bench import gpu
from cluster.engine.quantization import Quantization

CPU = torch.device("cpu")
SPEEDS = gpu.Speeds(bytes_per_second=1e12, flops=1e14)
SMALL = {
    **gpu.LLAMA_1B,
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_the_speeds_of_a_device_are_positive() -> None:
    speeds = gpu.Speeds.measure(CPU, num_bytes=2**20, size=64)
    assert speeds.bytes_per_second > 0
    assert speeds.flops > 0


def test_the_bound_of_a_step_is_its_bytes_or_its_operations() -> None:
    model = gpu.random_model(SMALL, CPU)
    layer = 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 256
    num_weights = 2 * layer + 128 * 512
    kv_bytes = 10 * 2 * 2 * 64 * 2
    assert SPEEDS.step_ms(model, 1, 1, 10) == pytest.approx(1e3 * (2 * num_weights + kv_bytes) / 1e12)
    many = 1e3 * (2 * num_weights * 6400 / 1e14 + 64 * kv_bytes / 1e12)
    assert SPEEDS.step_ms(model, 64, 100, 10) == pytest.approx(many)


def test_steps_are_measured_with_their_bounds() -> None:
    model = gpu.random_model(SMALL, CPU)
    shapes = [(1, 1, 40), (3, 2, 40)]
    steps = gpu.step_times("small", model, SPEEDS, shapes, repeats=2)
    assert [(step["sequences"], step["rows"], step["context"]) for step in steps] == shapes
    assert all(step["step_ms"] > step["bound_ms"] > 0 for step in steps)


@pytest.mark.parametrize("quantization", [None, Quantization.named("int4", 32)])
def test_levels_of_quantized_drafts_have_a_lower_bound(quantization: Quantization | None) -> None:
    model = gpu.random_model(SMALL, CPU, quantization=quantization)
    plain = gpu.random_model(SMALL, CPU)
    levels = gpu.level_times("small", model, SPEEDS, batch_sizes=(1, 2), context=24, repeats=3)
    assert [level["sequences"] for level in levels] == [1, 2]
    assert (levels[0]["bound_ms"] < SPEEDS.step_ms(plain, 1, 1, 24)) == (quantization is not None)


def test_the_tables_show_ratios() -> None:
    step = {"model": "8B", "form": "TritonModel", "numerics": "fast", "sequences": 1, "rows": 8, "context": 1000}
    document = {
        "steps": [step | {"step_ms": 5.0, "bound_ms": 4.0}],
        "levels": [{"model": "1B", "sequences": 64, "ms": 1.5, "bound_ms": 1.0}],
        "cluster": [
            {"draft": "draft", "streams": 4, "temperature": 1.0, "k": "auto"}
            | {"tokens_per_second": [300.0, 200.0, 250.0], "serve": [100.0]}
        ],
    }
    lines = gpu.table(document).splitlines()
    assert "| 8B | TritonModel | fast | 1 x 8 | 1000 | 5.00 | 1.25 |" in lines
    assert "| 1B | 64 | 1.50 | 1.50 |" in lines
    assert "| draft | 4 | 1 | auto | 2.50 |" in lines
