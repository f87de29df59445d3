"""Reads projections that a checkpoint stores quantized (`StoredFormat`).

Integers stay integers: 4 bits if the values minus zero points fit, otherwise 8. FP8, INT8 in blocks and out-of-order
groups (`desc_act`) become floating point, because no kernel here multiplies them. Activations stay in floating point,
even where another engine would quantize them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from cluster.engine.checkpoint import TensorReader
from cluster.engine.quantization import QuantizedWeight
from cluster.engine.stored_format import StoredFormat
from cluster.errors import ConfigurationError

_WORD_BITS = 32
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # place in a word of each of eight consecutive outputs

StoredWeight = torch.Tensor | QuantizedWeight


def read_stored(
    stored: StoredFormat, tensors: TensorReader, name: str, num_outputs: int, num_inputs: int
) -> StoredWeight:
    """Returns the weight [num_outputs, num_inputs] of the projection `name`.

    A projection that the checkpoint does not quantize is read as it is. Raises ConfigurationError if a tensor is
    missing or has the wrong shape, or if groups do not divide the inputs.
    """
    marker = stored.scale_name if stored.kind == "scaled" else _MARKERS[stored.kind]
    if tensors.find(f"{name}.{marker}") is None:
        return tensors.read([(f"{name}.weight", num_outputs)], num_inputs)
    return _READERS[stored.kind](stored, tensors, name, num_outputs, num_inputs)


def stack_outputs(weights: Sequence[StoredWeight]) -> StoredWeight:
    """Returns one weight with the outputs of all `weights`, which have the same inputs."""
    integers = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if len(integers) == len(weights) and len({weight.group_size for weight in integers}) == 1:
        values, scales = (torch.cat(parts) for parts in zip(*((w.values, w.scales) for w in integers), strict=True))
        bits: Literal[8, 4] = 4 if all(weight.bits == 4 for weight in integers) else 8
        return QuantizedWeight(values, scales, bits, integers[0].dtype)
    return torch.cat([to_floats(weight) for weight in weights])


def to_floats(weight: StoredWeight) -> torch.Tensor:
    """Returns `weight` in floating point."""
    return weight.dequantize().to(weight.dtype) if isinstance(weight, QuantizedWeight) else weight


def _gptq(stored: StoredFormat, tensors: TensorReader, name: str, num_outputs: int, num_inputs: int) -> StoredWeight:
    per_word, num_groups = _WORD_BITS // stored.bits, _num_groups(stored, name, num_inputs)
    words = tensors.read_raw(f"{name}.qweight", num_inputs // per_word, num_outputs, dtypes=_WORDS)
    zeros = _unpack(tensors.read_raw(f"{name}.qzeros", num_groups, num_outputs // per_word, dtypes=_WORDS), stored.bits)
    scales = tensors.read_raw(f"{name}.scales", num_groups, num_outputs).float()
    groups = _groups(tensors, f"{name}.g_idx", num_inputs, num_groups)
    return _in_groups(_unpack(words.T, stored.bits), scales.T, (zeros + stored.zero_offset).T, groups, tensors.dtype)


def _awq(stored: StoredFormat, tensors: TensorReader, name: str, num_outputs: int, num_inputs: int) -> StoredWeight:
    num_groups, num_words = _num_groups(stored, name, num_inputs), num_outputs * stored.bits // _WORD_BITS

    def unpacked(kind: str, num_rows: int) -> torch.Tensor:  # [num_outputs, num_rows]
        numbers = _unpack(tensors.read_raw(f"{name}.{kind}", num_rows, num_words, dtypes=_WORDS), stored.bits)
        return numbers.view(num_rows, num_words, -1)[..., _AWQ_ORDER].view(num_rows, num_outputs).T

    scales = tensors.read_raw(f"{name}.scales", num_groups, num_outputs).float()
    return _in_groups(unpacked("qweight", num_inputs), scales.T, unpacked("qzeros", num_groups), None, tensors.dtype)


def _packed(stored: StoredFormat, tensors: TensorReader, name: str, num_outputs: int, num_inputs: int) -> StoredWeight:
    words = tensors.read_raw(
        f"{name}.weight_packed", num_outputs, num_inputs * stored.bits // _WORD_BITS, dtypes=_WORDS
    )
    scales = tensors.read_raw(f"{name}.weight_scale", num_outputs, _num_groups(stored, name, num_inputs)).float()
    zeros = torch.full_like(scales, 2 ** (stored.bits - 1), dtype=torch.int32)
    groups = _groups(tensors, f"{name}.weight_g_idx", num_inputs, scales.shape[1])
    return _in_groups(_unpack(words, stored.bits), scales, zeros, groups, tensors.dtype)


def _scaled(stored: StoredFormat, tensors: TensorReader, name: str, num_outputs: int, num_inputs: int) -> StoredWeight:
    values = tensors.read_raw(f"{name}.weight", num_outputs, num_inputs, dtypes=_BYTES)
    if stored.block is None:
        scales = tensors.read_raw(f"{name}.{stored.scale_name}").float().reshape(-1, 1)
        if len(scales) not in (1, num_outputs):
            raise ConfigurationError(
                f"{name}.{stored.scale_name} has {len(scales)} scales, the projection has {num_outputs} outputs"
            )
        scales = scales.expand(num_outputs, 1)
        if values.dtype == torch.int8:
            return QuantizedWeight(values, scales.contiguous(), 8, tensors.dtype)
    else:
        blocks = [-(-size // part) for size, part in zip(values.shape, stored.block, strict=True)]
        scales = tensors.read_raw(f"{name}.{stored.scale_name}", *blocks).float()
        for dim, part in enumerate(stored.block):
            scales = scales.repeat_interleave(part, dim).narrow(dim, 0, values.shape[dim])
    return (values.float() * scales).to(tensors.dtype)


_WORDS = (torch.int32,)
_BYTES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_MARKERS = {"gptq": "qweight", "awq": "qweight", "packed": "weight_packed"}  # only quantized projections have these
_READERS: dict[str, Callable[[StoredFormat, TensorReader, str, int, int], StoredWeight]] = {
    "gptq": _gptq,
    "awq": _awq,
    "packed": _packed,
    "scaled": _scaled,
}


def _num_groups(stored: StoredFormat, name: str, num_inputs: int) -> int:
    if stored.group_size is None:
        return 1
    if num_inputs % stored.group_size:
        raise ConfigurationError(
            f"{name} has {num_inputs} inputs, which do not divide into the checkpoint's groups of {stored.group_size}"
        )
    return num_inputs // stored.group_size


def _groups(tensors: TensorReader, name: str, num_inputs: int, num_groups: int) -> torch.Tensor | None:
    """Returns the group of each input, int64 [num_inputs]; None if the checkpoint does not list them."""
    if tensors.find(name) is None:
        return None
    groups = tensors.read_raw(name, num_inputs).long()
    if groups.min() < 0 or groups.max() >= num_groups:
        raise ConfigurationError(f"{name} names groups outside of 0 to {num_groups - 1}")
    return groups


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the unsigned numbers in `words`, int32 [rows, words], lowest bits first: int32 [rows, numbers]."""
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32, device=words.device)
    numbers: torch.Tensor = (words[..., None] >> shifts) & (2**bits - 1)
    return numbers.flatten(1)


def _in_groups(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor | None, dtype: torch.dtype
) -> StoredWeight:
    """Returns the weight `(values - zeros) * scales`.

    `values` is int32 [num_outputs, num_inputs]; `scales` and `zeros` are [num_outputs, num_groups]. `groups`: group of
    each input; None: groups of equal size, in order.
    """
    num_inputs, num_groups = values.shape[1], scales.shape[1]
    in_order = torch.arange(num_inputs, device=values.device) // (num_inputs // num_groups)
    groups = in_order if groups is None else groups
    integers = values - zeros[:, groups]
    low, high = (int(bound) for bound in integers.aminmax())
    if torch.equal(groups, in_order) and low >= -128 and high <= 127:
        bits: Literal[8, 4] = 4 if low >= -8 and high <= 7 else 8
        return QuantizedWeight(integers.to(torch.int8).contiguous(), scales.contiguous(), bits, dtype)
    return (integers * scales[:, groups]).to(dtype)
