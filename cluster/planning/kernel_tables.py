"""Times of a step's kernels from measured tables: those of NVIDIA's AIConfigurator for vLLM.

The package `aiconfigurator-core` (extra `plan`, Apache-2.0) has the times of matrix products, attention and all-reduces
on A100, H100, H200 and L40S by their shapes, as vLLM calls them in bfloat16. Times between its points are interpolated
in logarithms of sizes and times; above its largest size, a time grows with the size. Its tables have no verification:

    attention of drafts and verification    as of one row a sequence, times the tiles of rows that read its KV
    attention of a prompt's later part      that of the whole prompt up to there less that of its beginning

Attention with other heads than those of the tables, and sampling, are by formula (`kernels`). The time that a step adds
to its kernels is assumed (`steps.Efficiency`).
"""

from __future__ import annotations

import functools
import importlib.util
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from typing import Any, Union

from cluster.engine.graph_memory import StepModel
from cluster.engine.memory_plan import PlannedModel
from cluster.planning.hardware import GpuGroup
from cluster.planning.kernels import Segments, Step, attention, num_rows, rows_per_tile, sampling
from cluster.planning.steps import ASSUMED, Efficiency, Roofline, StepPredictor

_PACKAGE = "aiconfigurator_core"
TABLED_GPUS = {"A100-80": "a100_sxm", "H100": "h100_sxm", "H200": "h200_sxm", "L40S": "l40s"}
"Folders of the tables by GPU."

_DTYPES = {"bf16": "bfloat16", "fp16": "bfloat16", "fp8": "fp8"}  # names of the tables
_GPU_COUNTS = (1, 2, 4, 8)  # of the tables of all-reduces

Table = Mapping[float, Union["Table", float]]
"A time in milliseconds by the sizes that it depends on, one level for each size, in ascending order."


def step_predictor(model: PlannedModel, gpus: GpuGroup, efficiency: Efficiency = ASSUMED) -> StepPredictor:
    """Returns the predictor with measured kernels if there are tables of matrix products; otherwise the roofline.

    `efficiency` says how fast kernels are: if it is not what is assumed, it is the roofline, too.
    """
    is_assumed = replace(efficiency, step_seconds=ASSUMED.step_seconds) == ASSUMED
    tabled = TabledSteps.of(model, gpus, efficiency) if is_assumed else None
    return tabled or Roofline(model, gpus, efficiency)


def interpolate(table: Table, *sizes: float) -> float:
    """Returns the time at `sizes` in milliseconds. Where points are missing, their nearest neighbours count."""
    known, (size, *others) = list(table), sizes

    def at(place: int) -> float:
        found = table[known[place]]
        return found if isinstance(found, float) else interpolate(found, *others)

    place = bisect_left(known, size)
    if place == len(known):
        return at(-1) * size / known[-1]
    if place == 0 or known[place] == size:
        return at(place)
    low, high = known[place - 1], known[place]
    share = log(size / low) / log(high / low)
    return exp((1 - share) * log(at(place - 1)) + share * log(at(place)))


@dataclass(frozen=True, slots=True)
class TabledSteps:
    """Steps of a dense decoder in 16 bits, or with weights in FP8. Its head, KV and attention are in 16 bits."""

    folder: Path  # of the tables
    model: PlannedModel
    shape: StepModel
    gpus: GpuGroup
    efficiency: Efficiency
    decoding: Table  # attention of one row a sequence: by sequences and context; empty: by formula
    prompts: Table  # attention of one prompt: by its tokens; empty: by formula
    all_reduces: Table  # by bytes; empty: one GPU

    @classmethod
    def of(cls, model: PlannedModel, gpus: GpuGroup, efficiency: Efficiency) -> TabledSteps | None:
        """Returns None if there are no tables of the model's dtype on these GPUs."""
        folder, shape = tables_folder(gpus.gpu.name), model.steps
        if folder is None or shape is None or model.dtype not in _DTYPES:
            return None
        # Nobody reported times of several L40S, which the measured machine connected by slow PCIe.
        counts = (1,) if gpus.gpu.name == "L40S" else _GPU_COUNTS
        if gpus.count not in counts or shape.num_heads % gpus.count:
            return None
        heads = {
            "num_heads": shape.num_heads // gpus.count,
            "num_key_value_heads": max(1, shape.num_kv_heads // gpus.count),
            "head_dim": shape.head_dim,
        }
        if not _gemms(folder, _DTYPES[model.dtype]):  # FP8 on an A100
            return None
        decoding = _attention(folder, "generation", heads, ("batch_size", "step"))
        prompts = _attention(folder, "context", heads | {"batch_size": 1}, ("isl",))
        all_reduces = {} if gpus.count == 1 else _all_reduces(folder, gpus.count)
        return cls(folder, model, shape, gpus, efficiency, decoding, prompts, all_reduces)

    def seconds(self, step: Step) -> float:
        rows, shape, count = num_rows(step), self.shape, self.gpus.count
        attended, num_kv_heads = shape.num_heads * shape.head_dim, max(1.0, shape.num_kv_heads / count)
        layer = (
            self._linear(rows, attended / count + 2 * num_kv_heads * shape.head_dim, shape.hidden_size)
            + self._linear(rows, shape.hidden_size, attended / count)
            + self._linear(rows, 2 * shape.intermediate_size / count, shape.hidden_size)
            + self._linear(rows, shape.hidden_size, shape.intermediate_size / count)
        )
        if self.all_reduces:
            layer += 2 * interpolate(self.all_reduces, 2 * rows * shape.hidden_size)
        sampled_rows = sum(segments.num_sampled_rows for segments in step)
        head = self._linear(sampled_rows, shape.vocab_size / count, shape.hidden_size, "bfloat16")
        products = (self.model.num_layers * layer + head) / 1e3
        sampled = self._formula.read_seconds(sampling(self.model, sampled_rows))
        return products + self._attention(step) + sampled + self.efficiency.step_seconds

    @property
    def source(self) -> str:
        by_formula = "" if self.decoding and self.prompts else "; attention by formula"
        return f"{self.model.name} on {self.gpus.name}: kernels as AIConfigurator measured them for vLLM{by_formula}"

    @property
    def _formula(self) -> Roofline:
        return Roofline(self.model, self.gpus, self.efficiency)

    def _linear(self, rows: float, outputs: float, inputs: float, dtype: str | None = None) -> float:
        return interpolate(_linears(self.folder, dtype or _DTYPES[self.model.dtype], outputs, inputs), rows)

    def _attention(self, step: Step) -> float:
        if not (self.decoding and self.prompts):
            kernel = attention(self.model, step)
            return max(self._formula.read_seconds(kernel), self._formula.compute_seconds(kernel))
        return self.model.num_layers / 1e3 * sum(self._attended(segments) for segments in step if segments.num_rows)

    def _attended(self, segments: Segments) -> float:
        """Returns the milliseconds of a layer's attention."""
        cached, rows = segments.cached_tokens, segments.rows
        if segments.sampled_rows is not None:  # prompts
            return segments.num_seqs * (self._prompt(cached + rows) - self._prompt(cached))
        tiles = segments.positions_read(rows_per_tile(self.shape)) / segments.positions
        return tiles * interpolate(self.decoding, segments.num_seqs, cached + rows)

    def _prompt(self, num_tokens: float) -> float:
        """Returns the milliseconds of a layer's attention for a prompt. It grows with the square of the length."""
        beyond = max(1.0, num_tokens / max(self.prompts))
        return beyond * interpolate(self.prompts, num_tokens) if num_tokens else 0.0


@functools.cache
def tables_folder(gpu: str) -> Path | None:
    """Returns the folder of the tables of `gpu`; None: there are none, or the package is not installed."""
    package = importlib.util.find_spec(_PACKAGE) if gpu in TABLED_GPUS else None
    if package is None or not package.submodule_search_locations:
        return None
    return Path(package.submodule_search_locations[0], "systems", "data", TABLED_GPUS[gpu])


@functools.cache
def _linears(folder: Path, dtype: str, outputs: float, inputs: float) -> Table:
    """Returns the times of a product with a matrix [outputs, inputs], by rows."""
    table = _gemms(folder, dtype)
    rows = {size for by_inputs in table.values() for by_rows in by_inputs.values() for size in by_rows}
    return {size: interpolate(table, outputs, inputs, size) for size in sorted(rows)}


@functools.cache
def _gemms(folder: Path, dtype: str) -> Any:
    return _table(folder, "gemm", "gemm_perf", {"gemm_dtype": dtype}, ("n", "k", "m"))


def _attention(folder: Path, kind: str, heads: dict[str, Any], sizes: Sequence[str]) -> Table:
    fixed = heads | {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "window_size": 0}
    return _table(folder, "attention", f"{kind}_attention_perf", fixed, sizes)


def _all_reduces(folder: Path, num_gpus: int) -> Table:
    fixed = {"num_gpus": num_gpus, "kernel_source": "vLLM_custom_graph"}
    by_elements = _table(folder, "comm", "custom_allreduce_perf", fixed, ("message_size",))
    return {2 * elements: milliseconds for elements, milliseconds in by_elements.items()}


def _table(folder: Path, kind: str, name: str, fixed: Mapping[str, Any], sizes: Sequence[str]) -> Table:
    """Reads the times by `sizes` where other columns have the values `fixed`; empty: no line has these."""
    from pyarrow import parquet  # comes with the extra

    files = sorted((folder / kind / "vllm").glob(f"*/{name}.parquet"), key=lambda path: _version(path.parent.name))
    if not files:
        return {}
    newest = files[-1]
    columns = parquet.read_schema(newest).names
    wanted = [(column, "=", value) for column, value in fixed.items() if column in columns]
    rows = parquet.read_table(newest, columns=[*sizes, "latency"], filters=wanted).to_pydict()
    table: dict[float, Any] = {}
    for *place, last, milliseconds in zip(*(rows[size] for size in sizes), rows["latency"], strict=True):
        inner = table
        for size in place:
            inner = inner.setdefault(size, {})
        inner[last] = min(milliseconds, inner.get(last, milliseconds))  # vLLM takes the fastest of several kernels
    return _ascending(table)


def _ascending(table: Table) -> Table:
    return {size: found if isinstance(found, float) else _ascending(found) for size, found in sorted(table.items())}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
