"""The compiled kernels for CPUs with AVX-512 (`kernels/`), where there are any, and what of a processor they use."""

from __future__ import annotations

import enum
import os

import torch

from cluster.errors import ConfigurationError

__all__ = ["LANES", "InstructionSet", "best_instruction_set", "has_kernels", "instruction_set", "kernels"]

try:
    from cluster.engine import _kernels as kernels
except ImportError:  # no C compiler when the package was installed
    kernels = None  # type: ignore[assignment]

LANES = 16  # float32 numbers in a register, as in kernels.h
VARIABLE = "OUTRIDER_CPU_ISA"


class InstructionSet(enum.IntEnum):
    """What matrix products are made of; as in kernels.h. The larger, the faster. Each has roundings of its own."""

    AVX512 = 0
    AVX512_BF16 = 1
    AMX = 2
    AMX_EMULATED = 3
    """The kernels for tiles where there are none: the same bits, too slow for anything but tests. Never the best."""

    @property
    def is_supported(self) -> bool:
        """Whether the kernels were built for it and run on this processor."""
        return kernels is not None and kernels.is_supported(self)


_CHOICES = {choice.name.lower(): choice for choice in InstructionSet}


def has_kernels() -> bool:
    """Whether the kernels were built and run on this processor."""
    return InstructionSet.AVX512.is_supported


def instruction_set(dtype: torch.dtype) -> InstructionSet:
    """The best that there is for a model in `dtype`, or what `OUTRIDER_CPU_ISA` says. There have to be kernels.

    What is in float32 is computed in float32. Raises ConfigurationError.
    """
    name = os.environ.get(VARIABLE)
    if name and name not in _CHOICES:
        raise ConfigurationError(f"{VARIABLE}={name}: it is none of {', '.join(_CHOICES)}")
    if name and not _CHOICES[name].is_supported:
        raise ConfigurationError(f"{VARIABLE}={name}: this processor lacks it, or the kernels were built without it")
    if dtype == torch.float32:
        return InstructionSet.AVX512
    return _CHOICES[name] if name else best_instruction_set()


def best_instruction_set() -> InstructionSet:
    """Of those that the kernels were built for and that run on this processor. There have to be kernels."""
    real = (choice for choice in InstructionSet if choice is not InstructionSet.AMX_EMULATED)
    return max(choice for choice in real if choice.is_supported)
