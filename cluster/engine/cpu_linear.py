"""Matrix products by the CPU kernels (`kernels/linear.c`)."""

from __future__ import annotations

import torch

from cluster.engine.cpu_kernels import InstructionSet, instruction_set, kernels
from cluster.engine.cpu_packing import Format, pack_scales, pack_weight
from cluster.engine.linear import Linear
from cluster.engine.quantization import QuantizedWeight


class KernelLinear:
    """Product of float32 rows with a weight, which is stored in the order in which the kernel reads it.

    `using`: set of instructions; by default the best for the weight's dtype. All sets except PORTABLE round the rows to
    bfloat16, and reject a weight in float32. The attribute `weight` contains the fields of a Weight of kernels.h as
    numbers, which are valid while this object exists.
    """

    def __init__(
        self,
        weight: torch.Tensor | QuantizedWeight,
        bias: torch.Tensor | None = None,
        using: InstructionSet | None = None,
    ) -> None:
        using = instruction_set(weight.dtype) if using is None else using
        if not using.is_supported:  # querying support also requests the permission to use tiles
            raise ValueError(f"{using.name} is not supported here")
        if isinstance(weight, QuantizedWeight):
            # INT4 stores inputs of a group in pairs.
            weight_format = Format.INT8 if weight.bits == 8 or weight.group_size % 2 else Format.INT4
            values, group_size = weight.values, weight.group_size
            self._scales = pack_scales(weight.scales, using)
        else:
            weight_format = Format.FLOAT32 if weight.dtype == torch.float32 else Format.BFLOAT16
            values, group_size = weight, weight.shape[1]
            self._scales = torch.empty(0)
        self._bias = None if bias is None else bias.float()
        self._panels = pack_weight(values, weight_format, group_size, using)
        self.num_bytes = self._panels.nbytes + self._scales.nbytes
        self._out_features, in_features = values.shape
        self.weight = [
            self._panels.data_ptr(),
            self._scales.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            in_features,
            self._out_features,
            group_size,
            weight_format,
            using,
        ]
        self._table = torch.tensor(self.weight, dtype=torch.int64)
        self._scratch_size = kernels.linear_scratch_size(self._table.data_ptr())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        x = x.contiguous()
        num_rows = x.shape[0]
        y, scratch = x.new_empty(num_rows, self._out_features), x.new_empty(num_rows, self._scratch_size)
        kernels.linear(
            x.data_ptr(),
            self._table.data_ptr(),
            y.data_ptr(),
            scratch.data_ptr(),
            num_rows,
            torch.get_num_threads(),
        )
        return y


class KernelWeightFormat:
    """Weights for the CPU kernels (a `WeightFormat`)."""

    def __init__(self, using: InstructionSet | None = None) -> None:
        """`using`: see `KernelLinear`."""
        self._using = using

    def make_linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None) -> Linear:
        return KernelLinear(weight, bias, self._using)

    def make_norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float().contiguous()
