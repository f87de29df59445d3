"""The line of `outrider --version`. `setup.py` imports this module, so it needs nothing but Python itself."""

from __future__ import annotations

import argparse
import importlib
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cluster.wire.version import WIRE_VERSION

COMMIT_FILE = Path("services", "commit.txt")
"""Where a build records its commit, from the root of an sdist or a wheel. A checkout has none."""

_ROOT = Path(__file__).resolve().parent.parent
_DESCRIBE = ("git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=7")
_KERNELS = {"engine": "cluster.engine._kernels", "sampling": "cluster.speculation._sampling"}


class ShowVersion(argparse.Action):
    """Prints the version line and exits. It is computed only when it is asked for, as it runs git."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(version_line())
        parser.exit()


def version_line() -> str:
    built = ", ".join(built_kernels()) or "none"
    return (
        f"outrider {version('outrider')} (commit {commit() or 'unknown'}, wire {WIRE_VERSION}, kernels built: {built})"
    )


def commit() -> str | None:
    """Returns the commit of this code: git's in a checkout, else the recorded one. None if neither is known."""
    if (_ROOT / ".git").exists():
        try:
            described = subprocess.run(_DESCRIBE, check=True, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError):  # no git, or not a repository it accepts
            return None
        return described.stdout.strip()
    recorded = _ROOT / COMMIT_FILE
    return recorded.read_text(encoding="utf-8").strip() if recorded.exists() else None


def built_kernels() -> list[str]:
    """Returns the compiled kernels that can be imported; this processor may not run them."""
    return [name for name, module in _KERNELS.items() if _can_import(module)]


def _can_import(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
