"""GPUs by name and by figures, and what is said of those that cannot be read."""

from __future__ import annotations

import pytest

from cluster.errors import ConfigurationError
from cluster.planning.hardware import parse_gpus, parse_price


def test_known_gpus_add_up() -> None:
    group = parse_gpus("4xA100-80", {"A100-80": 2.5})
    # 4 * 80 GB, 4 * 2,039 GB/s, 4 * 312 TFLOPS, 4 * 2.5 dollars
    assert group.memory_gb == 320
    assert group.bytes_per_second == pytest.approx(8.156e12)
    assert group.flops_per_second == pytest.approx(1.248e15)
    assert group.dollars_per_hour == 10


def test_any_other_gpu_is_its_figures() -> None:
    group = parse_gpus("2x24:600:70:0.9")
    assert (group.count, group.gpu.memory_gb, group.gpu.bandwidth_gb_s, group.gpu.tflops) == (2, 24, 600, 70)
    assert group.dollars_per_hour == 1.8


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("", "a GPU is missing"),
        ("A99", "'A99' is unknown (A10G, "),
        ("24:600:70", "GB:GB_PER_SECOND:TFLOPS:DOLLARS_PER_HOUR"),
        ("24:0:70:1", "above 0"),
    ],
)
def test_a_gpu_that_cannot_be_read_is_named(spec: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_gpus(spec)
    assert said in raised.value.message


@pytest.mark.parametrize("text", ["A10G", "A10G=", "A10G=-1", "A99=1"])
def test_a_price_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is no price"):
        parse_price(text)


def test_a_price() -> None:
    assert parse_price("A10G=0.8") == ("A10G", 0.8)
