"""Runs tests of Triton kernels in Triton's interpreter, which has to be chosen before Triton is imported.

They are in folders named `interpreted`, under names that pytest does not collect by itself. A test next to the folder
runs each of them in a pytest of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreter_bookkeeping import replacements


def programs(beside: str) -> list[Path]:
    """Returns the files with such tests in the folder next to the test file `beside`."""
    return sorted(path for path in (Path(beside).parent / "interpreted").glob("*.py") if path.stem != "__init__")


def run_interpreted(path: Path) -> None:
    """Runs the tests in `path`. If they fail, it fails with pytest's output."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def spare_bookkeeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `replacements` says."""
    for owner, name, value in replacements():
        monkeypatch.setattr(owner, name, value)
