"""Rounds on the device, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interpreter import programs, run_interpreted

pytest.importorskip("triton")


@pytest.mark.parametrize("path", programs(__file__), ids=lambda path: path.stem)
def test_in_the_interpreter(path: Path) -> None:
    run_interpreted(path)
