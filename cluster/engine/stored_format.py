"""The format in which a checkpoint stores quantized projections, by its config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

METHODS = (
    "gptq (4 or 8 bits), awq (4 bits, version gemm), fp8, compressed-tensors (one entry of config_groups, symmetric "
    "int4, int8 or fp8)"
)


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """Format of the quantized projections of a checkpoint.

    gptq      integers packed along the inputs, with scales and zero points by group
    awq       integers packed along the outputs in an order of their own, with scales and zero points by group
    packed    pack-quantized of compressed-tensors: integers packed along the inputs, with scales by group
    scaled    FP8 or INT8, a byte for each weight, with scales by output, by block, or one for all
    """

    kind: Literal["gptq", "awq", "packed", "scaled"]
    bits: Literal[8, 4] = 8  # of a weight
    group_size: int | None = None  # inputs that share a scale; None: all inputs
    zero_offset: int = 0  # to add to the stored zero points
    scale_name: str = "weight_scale"  # name of the scales after that of the projection
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale, if scales are by block
    loaded_bits: int = 16  # bits of a weight in memory: 16 if it becomes floating point

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> StoredFormat:
        """Returns the format that `quantization_config` describes. Raises ValueError if it is not supported."""
        try:
            found = _READERS.get(config.get("quant_method", ""), _unsupported)(config)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"quantization_config lacks a value or has a wrong one: {error!r}") from error
        if found is None:
            described = ", ".join(f"{key} {value!r}" for key, value in config.items())
            raise ValueError(f"quantization with {described} is not supported; supported: {METHODS}")
        return found


def _unsupported(config: Mapping[str, Any]) -> None:
    return None


def _gptq(config: Mapping[str, Any]) -> StoredFormat | None:
    bits, layout = _whole(config["bits"]), config.get("checkpoint_format", "gptq")
    if bits not in (4, 8) or layout not in ("gptq", "gptq_v2"):
        return None
    zero_offset = int(layout == "gptq")  # the first version stores zero points less 1
    loaded_bits = 16 if config.get("desc_act") else bits if config.get("sym", True) else 8
    return StoredFormat("gptq", bits, _group_size(config["group_size"]), zero_offset, loaded_bits=loaded_bits)


def _awq(config: Mapping[str, Any]) -> StoredFormat | None:
    if config.get("bits", config.get("w_bit")) != 4 or config.get("version", "gemm").lower() != "gemm":
        return None
    group_size = _group_size(config.get("group_size", config.get("q_group_size", 128)))
    return StoredFormat("awq", 4, group_size, loaded_bits=8)  # values minus zero points do not fit in 4 bits


def _fp8(config: Mapping[str, Any]) -> StoredFormat:
    block = config.get("weight_block_size")
    if block is None:
        return StoredFormat("scaled")
    return StoredFormat("scaled", scale_name="weight_scale_inv", block=_block(block))


def _compressed_tensors(config: Mapping[str, Any]) -> StoredFormat | None:
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1:
        return None
    weights, layout = groups[0]["weights"], config.get("format")
    bits, strategy = _whole(weights["num_bits"]), weights.get("strategy")
    if not weights.get("symmetric", True):
        return None
    if layout == "pack-quantized" and bits in (4, 8) and strategy in ("group", "channel"):
        group_size = _group_size(weights["group_size"]) if strategy == "group" else None
        return StoredFormat("packed", bits, group_size, loaded_bits=16 if weights.get("actorder") else bits)
    if layout not in ("float-quantized", "int-quantized", "naive-quantized") or bits != 8:
        return None
    if strategy == "block":
        return StoredFormat("scaled", block=_block(weights["block_structure"]))
    if strategy not in ("channel", "tensor"):
        return None
    return StoredFormat("scaled", loaded_bits=8 if weights.get("type") == "int" else 16)


def _group_size(size: object) -> int | None:
    return None if size == -1 else _whole(size)


def _block(sizes: Sequence[object]) -> tuple[int, int]:
    outputs, inputs = sizes
    return _whole(outputs), _whole(inputs)


def _whole(value: object) -> Any:
    """Returns `value` if it is a whole number above 0. Raises ValueError otherwise."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is not a whole number above 0")
    return value


_READERS = {"gptq": _gptq, "awq": _awq, "fp8": _fp8, "compressed-tensors": _compressed_tensors}
