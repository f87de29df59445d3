"""Copies the arrays of a step to a device at once, and tensors back to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 2  # int64 words: Triton compiles a kernel again for a pointer that is not a multiple of 16 bytes

Words = npt.NDArray[np.int64]


def copy_to(device: torch.device, numbers: Sequence[Sequence[int] | Words]) -> list[torch.Tensor]:
    """Returns `numbers` as int64 on `device`, in their shapes.

    The host does not wait for a GPU, because the copy is from pinned memory.
    """
    parts = [np.asarray(part, dtype=np.int64) for part in numbers]
    if device.type == "cpu":
        return [torch.from_numpy(part) for part in parts]
    packed = torch.empty(sum(map(_room, parts)), dtype=torch.int64, pin_memory=device.type == "cuda")
    for place, part in zip(split(packed, parts), parts, strict=True):
        place.numpy()[...] = part
    return split(packed.to(device, non_blocking=True), parts)


def split(packed: torch.Tensor, parts: Sequence[Words]) -> list[torch.Tensor]:
    """Returns a view of `packed` for each of `parts`, in its shape."""
    views, end = [], 0
    for part in parts:
        views.append(packed[end : end + part.size].view(part.shape))
        end += _room(part)
    return views


def _room(part: Words) -> int:
    return part.size + part.size % _ALIGNMENT


class HostCopy:
    """Copy of a one-dimensional int64 tensor on the host, which is made while the host goes on."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Starts the copy."""
        self._copied: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> list[int]:
        """Waits for the copy, but not for work that the device got later. Returns the numbers."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[int] = self._host.tolist()
        return numbers
