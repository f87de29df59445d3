"""Copies the arrays of a step to a device at once."""

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
