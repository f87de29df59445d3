"""How long tests run: `make test` runs short forms, `make soak`, which sets SOAK, runs long ones."""

from __future__ import annotations

import os
from typing import TypeVar

IS_SOAK = "SOAK" in os.environ

_T = TypeVar("_T")


def length(short: _T, long: _T) -> _T:
    """`short` in `make test`, `long` in `make soak`: seconds, numbers of cases, or the cases themselves."""
    return long if IS_SOAK else short
