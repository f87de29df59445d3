"""Tests of the parts of GPU benches that need no GPU: tables of measurements."""

from __future__ import annotations

import json
from pathlib import Path

from bench import gpu_vllm, vllm_ladder

RESULTS = Path(__file__).parents[2] / "bench" / "results"
MEASURED = (Path(__file__).parents[2] / "docs" / "MEASURED.md").read_text(encoding="utf-8")


def test_the_documents_table_is_that_of_the_results() -> None:
    table = gpu_vllm.table(json.loads((RESULTS / "gpu-vllm.json").read_text(encoding="utf-8")))
    assert table in MEASURED


def test_the_ladders_table_is_that_of_the_results() -> None:
    _, _, *rows = vllm_ladder.table(json.loads((RESULTS / "vllm-ladder.json").read_text(encoding="utf-8"))).splitlines()
    for row in rows:
        assert row.split("|")[3:] in [line.split("|")[3:] for line in MEASURED.splitlines()], row
