"""The check at start: passed by the kernels, refused where PyTorch's operators would run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.engine.batch import Batch
from cluster.engine.cpu_kernels import InstructionSet, has_kernels
from cluster.engine.cpu_model import CpuModel
from cluster.engine.invariance import check_invariance
from cluster.engine.loader import load_model
from cluster.engine.model import LayerInputs, Model, TorchModel
from cluster.engine.quantization import Quantization
from cluster.engine.runner import ModelRunner
from cluster.errors import ConfigurationError

from .instruction_sets import INSTRUCTION_SETS, form_using

CPU = torch.device("cpu")
needs_kernels = pytest.mark.skipif(not has_kernels(), reason="the kernels do not run here")


def runner(folder: Path, form: type[Model] | None = None, quantization: Quantization | None = None) -> ModelRunner:
    return ModelRunner(load_model(folder, torch.bfloat16, CPU, form=form, quantization=quantization), 4, 32)


@pytest.mark.parametrize("using", INSTRUCTION_SETS)
@pytest.mark.parametrize("quantization", [None, Quantization(8, None), Quantization(4, 32)])
def test_the_kernels_pass(
    tiny_llama: Callable[..., Path], quantization: Quantization | None, using: InstructionSet
) -> None:
    checked = runner(tiny_llama(), form_using(using), quantization)
    check_invariance(checked)
    assert checked.blocks.num_used_blocks == 0


def test_pytorchs_operators_are_refused(tiny_llama: Callable[..., Path]) -> None:
    with pytest.raises(ConfigurationError, match="needs the CPU kernels"):
        check_invariance(runner(tiny_llama(), TorchModel))


@needs_kernels
def test_an_operator_that_breaks_the_promise_is_found(tiny_llama: Callable[..., Path]) -> None:
    class Uneven(CpuModel):
        def forward(self, batch: Batch, inputs: LayerInputs | None = None) -> torch.Tensor:
            return super().forward(batch, inputs) * (1 + 1e-6 * (len(batch.token_ids) == 13))

    checked = runner(tiny_llama(), Uneven)
    with pytest.raises(ConfigurationError, match="does not hold on this machine"):
        check_invariance(checked)
    assert checked.blocks.num_used_blocks == 0
