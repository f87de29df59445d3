"""Tests of the fixes of vLLM's support for adapters."""

from __future__ import annotations

import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

from cluster.vllm.runner.lora_worker import spare_the_base_on_cpus


def test_rows_without_an_adapter_are_left_alone() -> None:
    spare_the_base_on_cpus()
    spare_the_base_on_cpus()  # once is enough, and twice is as well
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, 16, generator=generator)
    a, b = torch.randn(3, 1, 8, 16, generator=generator), torch.randn(3, 1, 16, 8, generator=generator)
    slots = torch.tensor([-1, 0, 2, -1])
    shrunk, outputs = torch.full((4, 8), 7.0), torch.ones(4, 16)
    for module in (lora_ops, punica_cpu):
        module.bgmv_shrink(inputs, a, shrunk, slots, 1.0)
    lora_ops.sgmv_expand_slice(
        shrunk, b, outputs, torch.arange(4), torch.ones(4, dtype=torch.long), slots, 4, 1, 4, 0, 16, True
    )
    assert torch.equal(outputs[[0, 3]], torch.ones(2, 16))
    for row, slot in ((1, 0), (2, 2)):
        torch.testing.assert_close(outputs[row], 1 + b[slot, 0] @ (a[slot, 0] @ inputs[row]))
    unused = torch.ones(4, 16)
    lora_ops.bgmv_expand(torch.ones(4, 8), b, unused, slots, True)  # as embeddings do, without the first of both
    assert torch.equal(unused[[0, 3]], torch.ones(2, 16))
