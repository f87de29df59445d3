"""Lets vLLM's V2 model runner work without a GPU: its Triton kernels run in Triton's interpreter.

For child processes of the tests, which have this folder on their PYTHONPATH, so that Python imports it at its start.
vLLM's CPU build switches Triton off unless there is a backend named `cpu`; the interpreter needs a driver that is
active, and of that no more than its answers to what vLLM asks. It has to be there before vLLM is imported, in every
process that vLLM starts. The interpreter's bookkeeping is spared once all of Triton is imported.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_PAUSE_S = 0.002  # a step takes the interpreter a tenth of a second


def _add_backend(backends: ModuleType) -> None:
    """Registers the stand-in in `triton.backends`, which has just been imported."""
    from triton.backends.driver import DriverBase

    class InterpreterDriver(DriverBase):
        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            raise NotImplementedError("the interpreter compiles nothing")

        def get_current_target(self) -> Any:
            from triton.backends.compiler import GPUTarget

            return GPUTarget("cpu", 0, 1)

        def get_current_device(self) -> int:
            return 0

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("cpu")

        def get_benchmarker(self) -> Any:
            raise NotImplementedError("the interpreter measures nothing")

    # The compiler is never asked for.
    backends.backends["cpu"] = backends.Backend(compiler=None, driver=InterpreterDriver)


def _spare_bookkeeping(_: ModuleType) -> None:
    from tests.interpreter_bookkeeping import replacements

    for owner, name, value in replacements():
        setattr(owner, name, value)


def _schedule_and_fork_as_on_a_gpu(cpu: ModuleType) -> None:
    """Makes vLLM on a CPU fork its workers, and schedule asynchronously if it is configured to.

    A spawned worker would import vLLM again, which takes 10 CPU seconds.
    """
    check = cpu.CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        is_async = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = is_async
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    cpu.CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _sleep_while_waiting(queues: ModuleType) -> None:
    """Makes vLLM's processes sleep between polls of their queues instead of spinning."""
    queues.sched_yield = lambda: time.sleep(_PAUSE_S)  # type: ignore[attr-defined]


class _After(MetaPathFinder):
    """Imports a module as ever, then does something to it."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                sys.meta_path.remove(self)  # not before: who only asks whether there is such a module imports nothing
                execute(module)
                self._act(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("TRITON_INTERPRET") == "1":
    sys.meta_path[:0] = [
        _After("triton.backends", _add_backend),
        _After("triton", _spare_bookkeeping),
        _After("vllm.platforms.cpu", _schedule_and_fork_as_on_a_gpu),
        _After("vllm.distributed.device_communicators.shm_broadcast", _sleep_while_waiting),
    ]
