"""Arrays of a step that are copied to a device at once."""

from __future__ import annotations

import numpy as np
import torch

from cluster.speculation.device_copy import copy_to, split

PARTS = [np.arange(size, dtype=np.int64) + 100 * size for size in (3, 0, 1, 4)] + [np.ones((3, 5), dtype=np.int64)]


def test_a_cpu_has_the_arrays() -> None:
    for copied, part in zip(copy_to(torch.device("cpu"), PARTS), PARTS, strict=True):
        assert torch.equal(copied, torch.from_numpy(part))


def test_parts_do_not_overlap_and_begin_at_multiples_of_16_bytes() -> None:
    packed = torch.zeros(30, dtype=torch.int64)
    views = split(packed, PARTS)
    for view, part in zip(views, PARTS, strict=True):
        assert view.numel() == 0 or view.data_ptr() % 16 == packed.data_ptr() % 16
        view.copy_(torch.from_numpy(part))
    for view, part in zip(views, PARTS, strict=True):
        assert torch.equal(view, torch.from_numpy(part))


def test_a_device_gets_all_shapes() -> None:
    """On a device without memory of its own."""
    copied = copy_to(torch.device("meta"), PARTS)
    assert [tuple(one.shape) for one in copied] == [part.shape for part in PARTS]
