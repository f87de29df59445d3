"""Checks that this machine computes what the portable kernels compute everywhere.

A faulty compiler, or options such as -ffast-math, would silently change bits. So a small model with
weights from a formula is run once, and its logits are compared with those that were recorded.
"""

from __future__ import annotations

import hashlib
from functools import cache

import torch

from cluster.engine.batch import Segment, pack
from cluster.engine.cpu_kernels import InstructionSet
from cluster.engine.cpu_linear import KernelLinear
from cluster.engine.cpu_model import CpuModel
from cluster.engine.kv_cache import KVCache
from cluster.engine.model_config import ModelConfig
from cluster.engine.quantization import Quantization, QuantizedWeight, quantize
from cluster.engine.rope_config import RopeConfig
from cluster.engine.weights import LayerWeights, ModelWeights

DIGEST = "22d55512bbc14782"
"The result of `digest` on every processor. It changes with `ENGINE_VERSION`."

_BLOCK_SIZE, _NUM_BLOCKS = 4, 12
_CONFIG = ModelConfig(
    vocab_size=80,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10_000.0),
    max_position_embeddings=64,
    tie_word_embeddings=False,
    eos_token_ids=(0,),
    has_qk_norm=True,
    sliding_windows=(64, 21),
)


@cache
def is_portable() -> bool:
    """Returns whether the kernels have the bits that they have on other processors. Requires `has_kernels`."""
    return digest() == DIGEST


def digest() -> str:
    """Returns a hexadecimal hash over logits, of a prompt of 41 tokens and of segments of 4, 1 and 2, in two dtypes."""
    found = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        model = CpuModel(
            _CONFIG, _weights(dtype), KVCache(_CONFIG, _NUM_BLOCKS, _BLOCK_SIZE, dtype, torch.device("cpu"))
        )
        table = list(range(_NUM_BLOCKS))
        for tokens, start in ((range(41), 0), (range(41, 45), 41), (range(45, 46), 45), (range(46, 48), 46)):
            segment = Segment([token % 80 for token in tokens], start, table, num_logits=len(tokens))
            logits = model.forward(pack([segment], _BLOCK_SIZE, torch.device("cpu")))
            found.update(logits.numpy().tobytes())
    return found.hexdigest()[:16]


def _weights(dtype: torch.dtype) -> ModelWeights:
    """Returns weights that use every format of the kernels."""
    config = _CONFIG
    heads, size, wide = config.num_heads + 2 * config.num_kv_heads, config.hidden_size, config.intermediate_size
    layers = tuple(
        LayerWeights(
            input_norm=_numbers(seed, size) + 1,
            qkv=_linear(_numbers(seed + 1, heads * config.head_dim, size).to(dtype), _numbers(seed + 2, 256)),
            qk_norm=_numbers(seed + 3, config.num_heads + config.num_kv_heads, config.head_dim) + 1,
            output=_linear(quantize(_numbers(seed + 4, size, config.q_size), Quantization(8, None))),
            post_attention_norm=_numbers(seed + 5, size) + 1,
            gate_up=_linear(_numbers(seed + 6, 2 * wide, size).to(dtype)),
            down=_linear(quantize(_numbers(seed + 7, size, wide), Quantization(4, 32))),
        )
        for seed in (10, 20)
    )
    embedding = _numbers(1, config.vocab_size, size).to(dtype)
    return ModelWeights(embedding, layers, _numbers(2, size) + 1, _linear(embedding))


def _linear(weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None) -> KernelLinear:
    return KernelLinear(weight, bias, InstructionSet.PORTABLE)


def _numbers(seed: int, *shape: int) -> torch.Tensor:
    """Returns numbers between -1/4 and 1/4, by a formula in integers."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7919 + seed * 104_729) % 1021 - 510).float().view(shape) / 2040
