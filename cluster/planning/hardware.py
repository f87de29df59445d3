"""GPUs and host CPUs: the figures of their data sheets, and their prices.

Bandwidth and peak are from NVIDIA's data sheets, of the SXM form if there are several forms. The peak is that of FP16
or bfloat16 on tensor cores without sparsity, summed in float32; both have the same figure. `steps.Efficiency` has the
shares of these figures that programs reach. Prices are examples, not offers: every command that uses them accepts
others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cluster.errors import ConfigurationError

_MOST = 1_000_000_000  # GB, GB/s, TFLOPS, dollars: larger values are typing errors
_MAX_COUNT_DIGITS = 5
_MAX_QUOTED = 40  # characters of the user's text
_GROUP = re.compile(r"((?P<count>[1-9]\d*)x)?(?P<gpu>.+)")


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_gb: float  # 10^9 bytes
    bandwidth_gb_s: float
    tflops: float  # FP16 or bfloat16, dense
    dollars_per_hour: float


@dataclass(frozen=True, slots=True)
class GpuGroup:
    """GPUs of one kind that share a model evenly (tensor parallelism)."""

    gpu: Gpu
    count: int = 1

    @property
    def name(self) -> str:
        return self.gpu.name if self.count == 1 else f"{self.count}x{self.gpu.name}"

    @property
    def memory_gb(self) -> float:
        return self.gpu.memory_gb * self.count

    @property
    def bytes_per_second(self) -> float:
        return self.gpu.bandwidth_gb_s * 1e9 * self.count

    @property
    def flops_per_second(self) -> float:
        return self.gpu.tflops * 1e12 * self.count

    @property
    def dollars_per_hour(self) -> float:
        return self.gpu.dollars_per_hour * self.count


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A10G", 24, 600, 70, 1.0),
        Gpu("L4", 24, 300, 121, 0.8),
        Gpu("L40S", 48, 864, 362, 1.9),
        Gpu("A100-40", 40, 1555, 312, 2.0),
        Gpu("A100-80", 80, 2039, 312, 3.0),
        Gpu("H100", 80, 3350, 989, 4.0),
        Gpu("H200", 141, 4800, 989, 5.0),
    )
}

# Cores of a GPU host for a draft (`draft.placement: host-cpu`); the price of the GPUs includes them.
# SPR-16: 16 cores with AMX of a Sapphire Rapids host, and 64 GB of its memory. On two cores this project's kernels read
# 13 GB/s a core, and computed 0.8 TFLOPS a core at 128 rows (`python -m bench.linear`).
# 16 cores are assumed to do 8 times that: 208 GB/s of the 307 GB/s of eight channels of DDR5-4800 (Intel's data
# sheet), and 0.8 TFLOPS a core after `steps.Efficiency` is applied to the peak. Not measured on 16 cores.
HOST_CPUS = {cpu.name: cpu for cpu in (Gpu("SPR-16", 64, 208, 22, 0.0),)}
DEFAULT_HOST_CPU = GpuGroup(HOST_CPUS["SPR-16"])


def find_gpu(device_name: str) -> Gpu | None:
    """Returns the GPU that CUDA calls `device_name`, such as `NVIDIA A100-SXM4-80GB`.

    Returns None if the table does not have the GPU. It has no parts of a GPU (MIG), and no PCIe and NVL forms, because
    their bandwidth differs from that of the SXM form.
    """
    words = set(re.split(r"[ -]", device_name))
    if words & {"MIG", "PCIe", "PCIE", "NVL"}:
        return None
    if "A100" in words:
        return GPUS["A100-80" if "80GB" in words else "A100-40"]
    return next((gpu for name, gpu in GPUS.items() if name in words), None)


def parse_gpus(spec: str, prices: Mapping[str, float] | None = None) -> GpuGroup:
    """Parses `[Nx]NAME` of a known GPU or host CPU, or `[Nx]MEMORY:BANDWIDTH:TFLOPS:DOLLARS`.

    The units are GB, GB/s, FP16 TFLOPS and dollars per hour. `prices`: prices by name, which replace those of the
    table. Raises ConfigurationError if `spec` is invalid.
    """
    match = _GROUP.fullmatch(spec)
    assert match is not None or not spec
    if match is None:
        raise ConfigurationError(f"a GPU is missing: write one of {', '.join(GPUS)}")
    if len(match["count"] or "") > _MAX_COUNT_DIGITS:
        raise ConfigurationError(f"{spec[:_MAX_QUOTED]!r}: too many GPUs: write 99,999 at most")
    name, count = match["gpu"], int(match["count"] or 1)
    if name in GPUS or name in HOST_CPUS:
        gpu = GPUS.get(name) or HOST_CPUS[name]
        return GpuGroup(replace(gpu, dollars_per_hour=(prices or {}).get(name, gpu.dollars_per_hour)), count)
    return GpuGroup(_free_gpu(name), count)


def _free_gpu(values: str) -> Gpu:
    try:
        memory, bandwidth, tflops, dollars = (float(value) for value in values.split(":"))
    except ValueError:
        raise ConfigurationError(
            f"{values!r} is unknown ({', '.join(GPUS)}): write GB:GB_PER_SECOND:TFLOPS:DOLLARS_PER_HOUR for another"
        ) from None
    if not (min(memory, bandwidth, tflops) > 0 and dollars >= 0 and max(memory, bandwidth, tflops, dollars) <= _MOST):
        raise ConfigurationError(
            f"{values[:_MAX_QUOTED]!r}: a GPU's memory, bandwidth and TFLOPS must be above 0, its price not below, "
            f"and none is above {_MOST:,}"
        )
    return Gpu(values, memory, bandwidth, tflops, dollars)


def parse_price(text: str) -> tuple[str, float]:
    """Parses `NAME=DOLLARS` an hour. Raises ConfigurationError."""
    name, equals, dollars = text.partition("=")
    try:
        price = float(dollars)
    except ValueError:
        price = -1.0
    if name not in GPUS or not equals or not 0 <= price <= _MOST:
        raise ConfigurationError(
            f"{text[:_MAX_QUOTED]!r} is no price: write NAME=DOLLARS per hour, NAME one of {', '.join(GPUS)}"
        )
    return name, price
