"""The devices that target and draft run on: cores of this machine, or one of its GPUs."""

from __future__ import annotations

import argparse
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.errors import ConfigurationError
from services.launch.host_cores import parse_cpu_list

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_CPU_LIST = re.compile(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*")


@dataclass(frozen=True, slots=True)
class Device:
    """Cores or a GPU; as text `cpu:0,1` or `cuda:1`."""

    kind: Literal["cpu", "cuda"]
    cpus: tuple[int, ...] = ()  # cores of a CPU; empty: all that this process may use
    index: int = 0  # index of a GPU among those that this process sees

    def __str__(self) -> str:
        return f"cuda:{self.index}" if self.kind == "cuda" else f"cpu:{','.join(map(str, self.cpus))}"

    @property
    def settings(self) -> dict[str, object]:
        """Settings of a worker that runs on the device."""
        return {"device": self.kind, "cpus": self.cpus if self.kind == "cpu" else None}

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which a program sees only this GPU; {} for a CPU."""
        if self.kind == "cpu":
            return {}
        visible = os.environ.get(_VISIBLE)
        return {_VISIBLE: visible.split(",")[self.index] if visible else str(self.index)}


def parse_device(text: str) -> Device:
    """Parses `cpu`, `cpu:CORES` such as `cpu:0-3,8`, `cuda` or `cuda:INDEX`, for argparse."""
    kind, colon, rest = text.partition(":")
    try:
        if kind == "cuda":
            return Device("cuda", index=_natural(rest) if colon else 0)
        if kind == "cpu":
            if colon and not _CPU_LIST.fullmatch(rest):
                raise ValueError(rest)
            return Device("cpu", tuple(sorted(set(parse_cpu_list(rest)))) if colon else ())
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a device, such as cpu:0-3 or cuda:1")


def choose_devices(target: Device | None, draft: Device | None) -> tuple[Device, Device]:
    """Returns both devices, with defaults for those that are None.

    The target's default is the first GPU, otherwise half of the cores. The draft's default is another GPU if the target
    has one, otherwise the cores that the target leaves, or all cores. Raises ConfigurationError if this machine does
    not have a device.
    """
    num_gpus, cores = count_gpus(), tuple(sorted(os.sched_getaffinity(0)))
    if target is None:
        target = Device("cuda") if num_gpus else Device("cpu", cores[: max(1, len(cores) // 2)])
    if draft is None:
        if target.kind == "cuda" and num_gpus > 1:
            draft = Device("cuda", index=1 if target.index == 0 else 0)
        else:
            draft = Device("cpu", tuple(core for core in cores if core not in target.cpus) or cores)
    return _present(target, cores, num_gpus), _present(draft, cores, num_gpus)


def count_gpus() -> int:
    import torch  # imported here, so that the command line starts without it

    return torch.cuda.device_count()


def describe(device: Device) -> str:
    """Returns the name of the GPU or the processor, with `device` in parentheses."""
    if device.kind == "cuda":
        import torch

        return f"{torch.cuda.get_device_name(device.index)} ({device})"
    return f"{processor()} ({device})"


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _present(device: Device, cores: tuple[int, ...], num_gpus: int) -> Device:
    if device.kind == "cuda":
        if device.index >= num_gpus:
            raise ConfigurationError(f"{device}: PyTorch finds {num_gpus} GPUs here")
        return device
    if missing := [core for core in device.cpus if core not in cores]:
        raise ConfigurationError(
            f"{device}: this process may use the cores {', '.join(map(str, cores))}, and not {missing[0]}"
        )
    return device if device.cpus else Device("cpu", cores)


def _natural(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5):
        raise ValueError(text)
    return int(text)
