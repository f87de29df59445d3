"""The Triton kernel, in its interpreter, and compiled for the GPUs that it is meant for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

_COMPARED = """
import numpy as np, torch
from cluster.speculation.device_noise import signed_word
from cluster.speculation.noise import NoiseKey, noise_words
from cluster.speculation.triton_noise import uniforms

draws = [(NoiseKey.derive(-5, 1), 0), (NoiseKey.derive(2**40, 7), 2**31), (NoiseKey(2**64 - 1, 2**64 - 1), 2**40)]
inputs = [[signed_word(key.low), signed_word(key.high), position] for key, position in draws]
for num_tokens in (1, 7, 4096, 1500):
    expected = np.stack([noise_words(key, position, num_tokens) for key, position in draws])
    seen = uniforms(*torch.tensor(inputs).unbind(1), num_tokens).numpy()
    assert seen.shape == expected.shape
    assert (seen == (expected + 0.5) * 2.0**-32).all(), num_tokens
"""
_COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from cluster.speculation.triton_noise import _uniforms

pointers = {"key_low": "*i64", "key_high": "*i64", "position": "*i64", "uniform": "*fp64", "num_tokens": "i32"}
source = ASTSource(_uniforms, pointers | {"num_blocks": "constexpr"}, {"num_blocks": 128})
for capability in (80, 86, 89, 90):
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert len(kernel.asm["cubin"]) > 1000
    assert ".local" not in kernel.asm["ptx"], "registers are spilled"
"""


@pytest.mark.parametrize(
    ("program", "interpreted"), [(_COMPARED, "1"), (_COMPILED, "0")], ids=["words as NumPy's", "compiles"]
)
def test_the_kernel(program: str, interpreted: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": interpreted}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
