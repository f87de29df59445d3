"""Common parts of checks on a GPU: the rows of their table, times, and the size of the pair that is timed."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

PAIR_WIDTH_FACTOR, PAIR_INTERMEDIATE_SIZE = 16, 32_768  # of the bundled target, for `bench.models`: 4.2B parameters

VOCAB_SIZES = (4096, 128_256)

ROWS = {
    "sampling": (
        *(f"coupled sampling, vocabulary of {size}" for size in VOCAB_SIZES),
        *(f"Triton sampling, vocabulary of {size}" for size in VOCAB_SIZES),
    ),
    "constraints": tuple(f"masks and log-probabilities, vocabulary of {size}" for size in VOCAB_SIZES),
    "triton-attention": (
        "Triton attention, float32",
        "Triton attention, bfloat16",
        "Triton attention, times of a layer",
    ),
    "triton-steps": ("steps with Triton attention, recorded, float32",),
    "triton-bursts": ("drafts in bursts, float32",),
    "product-invariant": (
        "products in a fixed order, bits in bfloat16",
        "products in a fixed order, times in bfloat16",
        "check of invariant numerics at start",
    ),
    "answers": ("answers under speculation, float32", "answers under speculation, bfloat16"),
    "engine": ("cost of a step, draft", "cost of a step, target"),
    "speed": ("speedup, target on the GPU, draft on cpu", "speedup, target on the GPU, draft on cuda"),
}
"""The rows of each check. docs/MEASURED.md lists the verdict on each."""

RESULTS = {
    "cost of a step, draft": "gpu-engine-draft.json",
    "cost of a step, target": "gpu-engine-target.json",
    "speedup, target on the GPU, draft on cpu": "gpu-speedup-draft-on-cpu.json",
    "speedup, target on the GPU, draft on cuda": "gpu-speedup-draft-on-cuda.json",
}
"""Files of their own that rows leave beside the report."""

NEVER_RUN = "never run on a GPU"
VERDICTS = {True: "held", False: "NOT held", None: "seen"}


@dataclass(slots=True)
class Row:
    check: str
    held: bool | None  # None: figures, which nothing is asked of
    seen: str
    figures: dict[str, Any] = field(default_factory=dict)


def not_listed(check: str, rows: Sequence[Row]) -> Row | None:
    """Returns a failed row if the rows of `check` are not those in `ROWS`, else None."""
    found = tuple(row.check for row in rows)
    if found == ROWS[check]:
        return None
    return Row(check, False, f"rows {found} are not those in bench/gpu_rows.py: {ROWS[check]}")


def verdicts(results: Path) -> dict[str, str]:
    """Returns the verdict on every row in the reports (`gpu*.json`) under `results`.

    A verdict names the GPU. A row in no report is marked as never run. A row that failed in any report has failed.
    Raises KeyError if a report has a row that is not listed.
    """
    found = dict.fromkeys((row for rows in ROWS.values() for row in rows), NEVER_RUN)
    for path in sorted(results.glob("gpu*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if "rows" not in report or "gpu" not in report["machine"]:
            continue
        for row in report["rows"]:
            # A check that raised has one row with its own name, in place of all of its rows.
            for name in ROWS.get(row["check"], (row["check"],)):
                if not found[name].startswith(VERDICTS[False]):
                    found[name] = f"{VERDICTS[row['held']]} on an {_gpu_of(report)}"
    main_report = json.loads((results / "gpu.json").read_text(encoding="utf-8"))
    for row, file in RESULTS.items():
        if found[row] == NEVER_RUN and (results / file).exists():  # of the same run, which had no such row then
            found[row] = f"{VERDICTS[None]} on an {_gpu_of(main_report)}"
    return found


def _gpu_of(report: dict[str, Any]) -> str:
    """`H100` of `NVIDIA H100 80GB HBM3`."""
    return str(report["machine"]["gpu"]).removeprefix("NVIDIA ").split()[0]


def milliseconds(call: Callable[[], object], repeats: int = 20, *, device: torch.device | None = None) -> float:
    """Returns the median. `device`: the GPU that `call` does not wait for; None: it waits."""
    seconds = []
    for _ in range(3 + repeats):
        started_at = time.perf_counter()
        call()
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started_at)
    return round(1e3 * statistics.median(seconds[3:]), 3)
