"""Every Triton kernel compiles for every architecture, nearly without spills, and fits into its shared memory.

Each kernel is compiled as it is launched, by the ptxas in Triton's wheel; no GPU is needed. Registers and local memory
(spilled bytes for each thread) are read from the machine code. Shared memory is the amount that a launch requests in
addition to the code's own. Architectures: 8.0 A100, 8.6 A10G, 8.9 L4 and L40S, 9.0 H100.
"""

from __future__ import annotations

import itertools
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cluster.engine.gpu_kernels import gate, norm, product, rotation
from cluster.engine.gpu_kernels import paged_attention as attention
from cluster.engine.gpu_kernels.product_tiles import TILES
from cluster.engine.quantization import QuantizedWeight
from cluster.speculation import triton_cut as cut
from cluster.speculation import triton_noise as noise
from cluster.speculation import triton_sampling as sampling
from tests.soak import length

CAPABILITIES = (80, 86, 89, 90)
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

_TYPES = {
    **dict.fromkeys(("part_sums", "part_totals", "part_maxima", "shaped", "chunk_scores", "scores"), "*fp32"),
    **dict.fromkeys(
        ("block_tables", "row_starts", "context_lens", "prefix_lens", "positions", "paths", "slots"), "*i64"
    ),
    **dict.fromkeys(("table", "records", "shaped_rows", "appendix", "ids", "key_low", "key_high", "position"), "*i64"),
    **dict.fromkeys(("allowed", "cuts", "chunk_equals", "chunk_ids"), "*i32"),
    "uniform": "*fp64",
    "scale": "fp32",
}
_OF_THE_MODEL = (  # arguments in the model's dtype
    *("output", "query", "keys", "values", "logits", "x", "weight", "bias"),
    *("scales", "total", "addend", "qkv", "head_norm", "cosines", "sines", "gate_up"),
)
_DTYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
_MULTIPLES_OF_16 = (
    *("query_stride", "output_stride", "slot_stride", "num_heads"),
    *("num_outputs", "num_inputs", "length"),
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel as one of its launches compiles it."""

    name: str
    function: Any
    constants: dict[str, Any]
    options: dict[str, Any]
    dtype: torch.dtype = torch.float32
    types: dict[str, str] = field(
        default_factory=dict
    )  # types of arguments that differ from the default for their name

    def compile(self, capability: int) -> Any:
        names = self.function.arg_names
        types = {name: "constexpr" if name in self.constants else self._type(name) for name in names}
        is_aligned = [
            types[name].startswith("*") or (types[name] != "constexpr" and name in _MULTIPLES_OF_16) for name in names
        ]
        aligned = {(index,): [["tt.divisibility", 16]] for index, is_so in enumerate(is_aligned) if is_so}
        source = ASTSource(self.function, types, self.constants, aligned)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=self.options)

    def _type(self, name: str) -> str:
        if name in self.types:
            return self.types[name]
        return _DTYPES[self.dtype] if name in _OF_THE_MODEL else _TYPES.get(name, "i32")


@dataclass(frozen=True, slots=True)
class Resources:
    registers: int  # of a thread
    spilled_bytes: int  # of a thread
    shared_bytes: int  # of a program


def kernels() -> Iterator[Kernel]:
    """All of them: attention with 64 heads and 8 KV heads of 128, and with 16 and 8 of 256; products and norms of 4,096
    values, the sampler for 128,256 tokens."""
    for dtype in _DTYPES:
        compiled = partial(attention.constants, 64, 8, 128, dtype, 16)
        options = attention.Sizes.of(dtype, 128).options
        name = f"attention, {str(dtype).removeprefix('torch.')}, heads of 256"
        wide = attention.constants(16, 8, 256, dtype, 16, 8, True)
        yield Kernel(name, attention.attention_kernel, wide, attention.Sizes.of(dtype, 256).options, dtype)
        for path_len in (0, 8):
            for is_split in (False, True):
                name = f"attention, {str(dtype).removeprefix('torch.')}"
                name += ", trees" * (path_len > 0) + ", by splits" * is_split
                yield Kernel(name, attention.attention_kernel, compiled(path_len, is_split), options, dtype)
        constants = {key: value for key, value in compiled(8, True).items() if key in attention.OF_MERGE}
        name = f"attention, {str(dtype).removeprefix('torch.')}, merge"
        yield Kernel(name, attention.merge_kernel, constants, attention.MERGE_OPTIONS, dtype)
        yield from _products(dtype)
    chunk, options = {"chunk": sampling.CHUNK}, sampling.OPTIONS
    yield Kernel("sampling, shape", sampling.shape_kernel, chunk, options)
    yield Kernel("sampling, bias", sampling.bias_kernel, {"step": sampling.BIAS_STEP}, options)
    yield Kernel("sampling, cut, best", cut.best_kernel, chunk, options)
    for by_weight, name in ((False, "top-k"), (True, "top-p")):
        constants = {"by_weight": by_weight, "step": cut.STEP, **chunk}
        yield Kernel(f"sampling, cut, narrow {name}", cut.narrow_kernel, constants, options)
    yield Kernel("sampling, cut, ties", cut.ties_kernel, chunk, options)
    for width in (1, 8):
        constants = {"width": width, "max_chunks": 128, **chunk}
        yield Kernel(f"sampling, draw the best {width}", sampling.draw_kernel, constants, options)
    yield Kernel("sampling, merge", sampling.merge_kernel, {"entries": 512}, options)
    yield Kernel("noise", noise._uniforms, {"num_blocks": noise._BLOCKS_PER_PROGRAM}, {"num_warps": 4})


def _products(dtype: torch.dtype) -> Iterator[Kernel]:
    name = str(dtype).removeprefix("torch.")
    for tile in TILES[dtype.itemsize]:
        for is_split in (False, True):
            constants = product.constants(tile, 4096, dtype, has_bias=not is_split, is_split=is_split)
            title = f"product, {name}, {tile.num_rows} x {tile.num_columns}" + ", by parts" * is_split
            yield Kernel(title, product.product_kernel, constants, product.options(tile), dtype)
    bits: Literal[8, 4]
    for bits in (8, 4):
        packed = product.PackedWeight.of(_quantized(bits, dtype))
        assert packed is not None
        for tile in TILES[dtype.itemsize]:
            constants = product.constants(tile, 4096, dtype, has_bias=False, is_split=True, packed=packed)
            title = f"product, {name}, int{bits}, {tile.num_rows} x {tile.num_columns}"
            types = {"weight": "*i8" if bits == 8 else "*u8"}
            yield Kernel(title, product.product_kernel, constants, product.options(tile), dtype, types)
    constants = {"columns": product.ADD_COLUMNS, "has_bias": True}
    yield Kernel(f"product, {name}, add parts", product.add_parts_kernel, constants, product.ADD_OPTIONS, dtype)
    for has_addend in (False, True):
        constants, options = norm.constants(4096, 1e-5, has_addend=has_addend)
        yield Kernel(f"norm, {name}" + ", of a sum" * has_addend, norm.norm_kernel, constants, options, dtype)
    for has_norm in (False, True):
        constants = rotation.constants(128, 1e-5, has_norm=has_norm)
        title = f"rotation, {name}" + ", with norms" * has_norm
        yield Kernel(title, rotation.rotate_kernel, constants, rotation.OPTIONS, dtype)
    yield Kernel(f"gate, {name}", gate.gate_kernel, gate.constants(), gate.OPTIONS, dtype)


def _quantized(bits: Literal[8, 4], dtype: torch.dtype) -> QuantizedWeight:
    num_groups = 1 if bits == 8 else 4096 // 32
    return QuantizedWeight(torch.zeros(1, 4096, dtype=torch.int8), torch.ones(1, num_groups), bits, dtype)


def resources(kernel: Kernel, capability: int) -> Resources:
    compiled = kernel.compile(capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(_CUOBJDUMP), "-res-usage", file.name]
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    used = dict(part.split(":") for part in printed.strip().splitlines()[-1].split())
    return Resources(int(used["REG"]), int(used["STACK"]) + int(used["LOCAL"]), compiled.metadata.shared)


SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # that a program may have
KERNELS = list(kernels())
SOME = [one for one in CAPABILITIES if one != 86]  # 8.6 has the limits of 8.9
# The short run compiles each kernel for one architecture only, and takes the architectures in turn.
CASES = length(
    [(kernel, SOME[number % len(SOME)]) for number, kernel in enumerate(KERNELS)],
    list(itertools.product(KERNELS, CAPABILITIES)),
)


@pytest.mark.parametrize(
    ("kernel", "capability"), CASES, ids=[f"{kernel.name}-{capability}" for kernel, capability in CASES]
)
def test_it_compiles(kernel: Kernel, capability: int) -> None:
    found = resources(kernel, capability)
    assert found.spilled_bytes <= (32 if "float32" in kernel.name else 0)  # which nobody serves with on a GPU
    assert found.shared_bytes <= SHARED_BYTES[capability]
    assert 0 < found.registers <= 255
