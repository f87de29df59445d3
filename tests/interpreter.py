"""Runs tests of Triton kernels in Triton's interpreter, which has to be chosen before Triton is imported.

They are in folders named `interpreted`, under names that pytest does not collect by itself; a test beside the folder
hands each of them to a pytest of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreter_bookkeeping import replacements


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
    """As `replacements` says."""
    for owner, name, value in replacements():
        monkeypatch.setattr(owner, name, value)
