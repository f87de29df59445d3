"""Parameters of tests that hold for every set of instructions; what is not supported here is skipped."""

from __future__ import annotations

import pytest

from cluster.engine.cpu_kernels import InstructionSet
from cluster.engine.cpu_linear import KernelWeightFormat
from cluster.engine.cpu_model import CpuModel

INSTRUCTION_SETS = [
    pytest.param(
        choice,
        id=choice.name.lower(),
        marks=pytest.mark.skipif(not choice.is_supported, reason="not built, or the processor lacks it"),
    )
    for choice in InstructionSet
]


def form_using(instruction_set: InstructionSet) -> type[CpuModel]:
    """The decoder on a CPU, with products of these instructions."""

    class Form(CpuModel):
        weight_format = KernelWeightFormat(instruction_set)

    return Form
