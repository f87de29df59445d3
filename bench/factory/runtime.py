"""Device, precision, compilation and determinism of a training."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Runtime:
    """Settings for computing tensors; they change results only by rounding."""

    device: torch.device
    is_compiled: bool = False
    is_deterministic: bool = True

    @property
    def inference_dtype(self) -> torch.dtype:
        """The dtype of frozen models: CPUs without bfloat16 units would emulate it slowly."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    def prepare(self) -> None:
        """Set torch's global switches. Call once, before the first computation on the device."""
        if not self.is_deterministic:
            return
        # cuBLAS reads this when its first handle is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Filling new tensors guards against reading uninitialized memory, which this code never does.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if self.is_compiled:
            from torch._inductor import config as compiler  # slow to import, so only imported when used

            if hasattr(compiler, "deterministic"):
                compiler.deterministic = True  # kernels are not chosen by timing

    def mixed_precision(self) -> AbstractContextManager[object]:
        """Return a context in which GPUs multiply float32 matrices in bfloat16."""
        if self.device.type == "cuda":
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return nullcontext()

    def compile(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Compile a function of windows if `is_compiled`, once for each shape of its argument."""
        return torch.compile(function, dynamic=False) if self.is_compiled else function

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def choose_device(name: str) -> torch.device:
    """Return the device called ``auto``, ``cpu`` or ``cuda``.

    Raises ValueError for ``cuda`` if torch finds no CUDA device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("this machine has no CUDA device that torch can use")
    return torch.device(name)
