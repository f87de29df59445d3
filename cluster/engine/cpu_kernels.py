"""The compiled kernels for CPUs (`kernels/`), and the instructions of a processor that they use."""

from __future__ import annotations

import enum
import os

import torch

from cluster.errors import ConfigurationError

__all__ = [
    "LANES",
    "NO_KERNELS",
    "InstructionSet",
    "best_instruction_set",
    "has_kernels",
    "instruction_set",
    "kernels",
    "why_no_kernels",
]

try:
    from cluster.engine import _kernels as kernels
except ImportError:  # there was no C compiler at installation
    kernels = None  # type: ignore[assignment]

LANES = 16  # float32 numbers in a vector, as in vector.h
VARIABLE = "OUTRIDER_CPU_ISA"
LANES_VARIABLE = "OUTRIDER_CPU_LANES"  # for tests: 16, 8 or 4 numbers in a register, which changes no bit
NO_KERNELS = "none"  # value of the variable with which PyTorch's operators run

if kernels is not None and (_lanes := os.environ.get(LANES_VARIABLE)) and not kernels.use_lanes(int(_lanes)):
    raise ConfigurationError(f"{LANES_VARIABLE}={_lanes} is not available on this processor")


class InstructionSet(enum.IntEnum):
    """Sets of instructions that compute matrix products, numbered as in kernels.h.

    A set with a larger number is faster. Each set rounds differently.
    """

    PORTABLE = 0
    "The same bits on every processor, with registers of any width."
    AVX512_BF16 = 1
    AMX = 2
    AMX_EMULATED = 3
    "The kernels for tiles, emulated: the same bits, too slow for anything but tests. Never the best."

    @property
    def is_supported(self) -> bool:
        """True if the kernels were built for these instructions and this processor has them."""
        return kernels is not None and kernels.is_supported(self)


_CHOICES = {choice.name.lower(): choice for choice in InstructionSet}


def has_kernels() -> bool:
    """Returns True if the kernels were built, run on this processor and are not switched off."""
    return why_no_kernels() is None


def why_no_kernels() -> str | None:
    """Returns why the kernels do not run, and what to do; None if they run."""
    if os.environ.get(VARIABLE) == NO_KERNELS:
        return f"{VARIABLE} is {NO_KERNELS}: unset it"
    if kernels is None:
        return (
            "The kernels were not built: install a C compiler and Python's headers (gcc, python3-dev), then reinstall"
        )
    if not InstructionSet.PORTABLE.is_supported:
        return "The kernels need a processor with AVX2 and FMA, or an ARM processor of 64 bits"
    return None


def instruction_set(dtype: torch.dtype) -> InstructionSet:
    """Returns the best instruction set for a model in `dtype`, or the one that `OUTRIDER_CPU_ISA` names.

    For a model in float32, always returns PORTABLE, which computes in float32. Requires `has_kernels`. Raises
    ConfigurationError if the variable names an unknown or unsupported set.
    """
    name = os.environ.get(VARIABLE)
    if name and name not in _CHOICES:
        raise ConfigurationError(f"{VARIABLE}={name} is unknown: set it to one of {', '.join((NO_KERNELS, *_CHOICES))}")
    if name and not _CHOICES[name].is_supported:
        raise ConfigurationError(
            f"{VARIABLE}={name} is not available: this processor lacks it, or the kernels were built without it"
        )
    if dtype == torch.float32:
        return InstructionSet.PORTABLE
    return _CHOICES[name] if name else best_instruction_set()


def best_instruction_set() -> InstructionSet:
    """Returns the fastest set that is supported on this processor. Requires `has_kernels`."""
    real = (choice for choice in InstructionSet if choice is not InstructionSet.AMX_EMULATED)
    return max(choice for choice in real if choice.is_supported)
