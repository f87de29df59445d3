"""Result files of the benches, and the description of the machine that they were measured on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.prove.devices import processor


def describe_machine() -> dict[str, str | int]:
    return {"processor": processor(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}


def write_result(path: Path, document: Mapping[str, Any]) -> None:
    """Writes `document` to `path` as JSON, and makes the folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_cells(path: Path, module: str, argv: Sequence[str] | None, cells: Sequence[dict[str, Any]]) -> None:
    """Writes `cells` to `path`, with the date, the commit and the command line.

    `argv`: the arguments of `module`'s `main`; None: those of this process.
    """
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    document = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip(),
        "command": " ".join([f"python -m {module}", *(sys.argv[1:] if argv is None else argv)]),
        "cells": cells,
    }
    write_result(path, document)
