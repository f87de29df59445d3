"""Runs tests of Triton kernels in Triton's interpreter, which has to be chosen before Triton is imported.

They are in folders named `interpreted`, under names that pytest does not collect by itself; a test beside the folder
hands each of them to a pytest of its own.
"""

from __future__ import annotations

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


def patch_language_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of a kernel, functions that it calls find Triton's language patched: the interpreter looks through all of
    it at every call, which takes most of its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_if_needed(function: Any) -> Any:
        languages = [v for v in function.__globals__.values() if inspect.ismodule(v) and v in (tl, tl.core)]
        is_needed = any(tl.core.is_builtin(language.load) for language in languages)
        return patch(function) if is_needed else interpreter._LangPatchScope()

    monkeypatch.setattr(interpreter, "_patch_lang", patch_if_needed)
