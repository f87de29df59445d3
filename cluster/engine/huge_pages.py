"""Memory for data that a step reads sequentially, in pages of 2 MiB if the system has them.

With pages of 4 KiB, a processor looks up a page for every 64 cache lines, and its prefetching stops at the end of each
page.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch

_HUGE_PAGE = 2**21


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor of zeros on the CPU, whose pages are allocated when they are first touched."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*shape, dtype=dtype)
    # By default, shared memory uses small pages. The memory beyond the tensor is never touched.
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
    with contextlib.suppress(OSError):  # the kernel has no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, num_bytes // _HUGE_PAGE * _HUGE_PAGE)
    # The tensor keeps a reference to `memory`.
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=start).view(*shape)
