"""The compiled kernels for CPUs with AVX-512 (`kernels/`), where there are any."""

from __future__ import annotations

__all__ = ["LANES", "has_kernels", "kernels"]

try:
    from cluster.engine import _kernels as kernels
except ImportError:  # no C compiler when the package was installed
    kernels = None  # type: ignore[assignment]

LANES = 16  # float32 numbers in a register, as in kernels.h


def has_kernels() -> bool:
    """Whether the kernels were built and run on this processor."""
    return kernels is not None and kernels.is_supported()
