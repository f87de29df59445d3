"""Results of a bench as cells, in `bench/results/`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def write_cells(out: Path, module: str, argv: Sequence[str] | None, cells: Sequence[dict[str, Any]]) -> None:
    """Writes `cells` to `out`, with the date, the commit and the command line.

    `argv`: the arguments of `module`'s `main`; None: those of this process.
    """
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip(),
        "command": " ".join([f"python -m {module}", *(sys.argv[1:] if argv is None else argv)]),
        "cells": cells,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
