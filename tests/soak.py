"""How long tests run: `make test` runs short forms, `make soak`, which sets SOAK, runs long ones."""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

IS_SOAK = "SOAK" in os.environ

only_in_soak = pytest.mark.skipif(not IS_SOAK, reason="a long test: it runs in `make soak`")

_T = TypeVar("_T")


def length(short: _T, long: _T) -> _T:
    """`short` in `make test`, `long` in `make soak`: seconds, numbers of cases, or the cases themselves."""
    return long if IS_SOAK else short
