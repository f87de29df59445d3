"""Runs tests of Triton kernels in Triton's interpreter, which has to be chosen before Triton is imported.

They are in folders named `interpreted`, under names that pytest does not collect by itself; a test beside the folder
hands each of them to a pytest of its own.
"""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def programs(beside: str) -> list[Path]:
    """The files with such tests in the folder beside the test file `beside`."""
    return sorted(path for path in (Path(beside).parent / "interpreted").glob("*.py") if path.stem != "__init__")


def run_interpreted(path: Path) -> None:
    """Fails with what pytest said about the tests in `path`."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def spare_bookkeeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the interpreter do less of what takes most of its time, which is not numbers but types.

    Inside of a kernel, functions that it calls find Triton's language patched: it looks through all of that at every
    call. It looks up NumPy's type for each of Triton's, and makes Triton's of each block anew. It broadcasts blocks
    that have the same shape.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, broadcast = interpreter._patch_lang, interpreter.TritonSemantic.broadcast_impl_value
    look_up, numpy_types = interpreter._get_np_dtype, dict[str, Any]()

    @functools.cache
    def languages(function: Any) -> list[Any]:
        return [v for v in function.__globals__.values() if inspect.ismodule(v) and v in (tl, tl.core)]

    def patch_if_needed(function: Any) -> Any:
        is_needed = any(tl.core.is_builtin(language.load) for language in languages(function))
        return patch(function) if is_needed else interpreter._LangPatchScope()

    def numpy_type(of: Any) -> Any:
        if of.scalar.name not in numpy_types:
            numpy_types[of.scalar.name] = look_up(of)
        return numpy_types[of.scalar.name]

    def broadcast_if_needed(semantic: Any, left: Any, right: Any) -> Any:
        is_needed = left.type.is_block() != right.type.is_block() or left.handle.data.shape != right.handle.data.shape
        return broadcast(semantic, left, right) if is_needed else (left, right)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_if_needed)
    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_type)
    monkeypatch.setattr(interpreter.TritonSemantic, "broadcast_impl_value", broadcast_if_needed)
    monkeypatch.setattr(tl.block_type, "to_ir", lambda block, builder: block)
