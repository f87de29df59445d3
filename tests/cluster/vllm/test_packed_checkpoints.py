"""The checkpoints of our loader's tests are packed like vLLM's and compressed-tensors'."""

from __future__ import annotations

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from vllm.model_executor.layers.quantization.utils.quant_utils import awq_pack, gptq_pack

from ..engine.quantized_checkpoints import awq, gptq, integers, packed_int4

WEIGHT = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))


def test_gptq() -> None:
    for bits in (4, 8):
        values, *_ = integers(WEIGHT, bits, symmetric=True)
        tensors, _ = gptq(bits)(WEIGHT)
        assert torch.equal(gptq_pack(values.T.int(), bits, 64, 48), tensors["qweight"])


def test_awq() -> None:
    values, _, zeros, _ = integers(WEIGHT, 4, symmetric=False)
    tensors, _ = awq(WEIGHT)
    assert torch.equal(awq_pack(values.T.int(), 4, 64, 48), tensors["qweight"])
    assert torch.equal(awq_pack(zeros.T.int(), 4, 2, 48), tensors["qzeros"])


def test_compressed_tensors() -> None:
    values, *_ = integers(WEIGHT, 4, symmetric=True)
    tensors, _ = packed_int4(WEIGHT)
    assert torch.equal(pack_to_int32((values - 8).to(torch.int8), 4), tensors["weight_packed"])
