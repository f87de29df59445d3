"""A file that a command writes at its end, checked before its work."""

from __future__ import annotations

import os
from pathlib import Path

from cluster.errors import ConfigurationError


def check_output(option: str, file: Path | None) -> None:
    """Raises ConfigurationError if `file`, which `option` names, cannot be written."""
    if file is None:
        return
    if not file.parent.is_dir():
        raise ConfigurationError(f"{option} {file}: there is no folder {file.parent}")
    if file.is_dir():
        raise ConfigurationError(f"{option} {file} is a folder: name a file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigurationError(f"{option} {file} may not be written: choose another, or change its permissions")
