"""Tests of the parts of GPU benches that need no GPU: tables of measurements."""

from __future__ import annotations

from typing import Any

from bench import gpu_vllm


def cell(streams: int, k: int | str, where: str, rate: float) -> dict[str, Any]:
    both = {"serve": [100.0], "draft_model": [50.0]}
    return {"streams": streams, "temperature": 0.0, "k": k, "where": where, "tokens_per_second": [rate], **both}


def test_every_place_of_the_draft_has_a_column() -> None:
    cells = [cell(1, 0, "", 90.0), cell(1, 4, "in-process", 150.0), cell(1, 4, "remote", 120.0)]
    cells.append(cell(4, 4, "remote", 80.0))
    assert gpu_vllm.table({"cells": cells}).splitlines() == [
        "| streams | T | vllm serve | its draft_model | k = 0 | k = 4, in-process | k = 4, remote |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| 1 | 0 | 100 | 50 | 90 (0.90) | 150 (1.50) | 120 (1.20) |",
        "| 4 | 0 | 100 | 50 |  |  | 80 (0.80) |",
    ]
