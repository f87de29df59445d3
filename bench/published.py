"""Compares predicted times with published measurements: `python -m bench.published`.

NVIDIA's AIConfigurator (`outrider[plan]`) comes with the times per output token that benchmarks of serving reported: a
number of clients that ask without pause, prompts and answers of given lengths, on the GPUs of a row. Rows are those of
dense models in bfloat16 or FP8, with GPUs that have tables of kernels. A cell is the median, least and largest of
predicted over reported: with measured kernels, and by formula. Times to the first token are left out: the clients of
these runs send their first requests at once.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.result import write_cells
from cluster.engine.memory_plan import PlannedModel
from cluster.engine.model_config import ModelConfig
from cluster.errors import ConfigurationError
from cluster.planning.hardware import parse_gpus
from cluster.planning.kernel_tables import TABLED_GPUS, step_predictor, tables_folder
from cluster.planning.overheads import NO_OVERHEADS
from cluster.planning.prediction import ExpectedLoad, Option, plan
from cluster.planning.steps import Roofline, StepPredictor

_NEAR = 0.2  # of the report
_SIZES = {"meta-llama/Llama-3.1-8B-Instruct": "8B", "meta-llama/Llama-3.1-70B": "70B"}  # without a configuration
_MAX_NUM_BATCHED_TOKENS = 8192  # the default of the servers


@dataclass(frozen=True, slots=True)
class Reported:
    model: str
    dtype: str
    server: str
    gpus: str
    clients: int
    prompt_tokens: int
    answer_tokens: int
    ms: float  # per output token

    def ratio(self, steps: StepPredictor) -> float:
        """Returns predicted over reported."""
        load = ExpectedLoad(
            self.clients, self.prompt_tokens, self.answer_tokens, _MAX_NUM_BATCHED_TOKENS, max_prefill_seconds=None
        )
        return 1e3 * plan(Option("", steps, overheads=NO_OVERHEADS), load).latency.between_tokens / self.ms


def reported(systems: Path) -> Iterator[Reported]:
    """Yields the measurements in the package's folder `systems` that a plan has a counterpart of."""
    gpu_of = {folder: gpu for gpu, folder in TABLED_GPUS.items()}
    with (systems / "silicon_sample.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            dtype = {"": "bf16", "bf16": "bf16", "fp8": "fp8"}.get(row["precision"])
            if row["mode"] != "agg" or row["system"] not in gpu_of or dtype is None:
                continue
            count, gpu = int(float(row["tp_size"])), gpu_of[row["system"]]
            yield Reported(
                row["model_path"],
                dtype,
                row["backend"],
                gpu if count == 1 else f"{count}x{gpu}",
                int(float(row["batch_size"])),
                int(row["isl"]),
                int(row["osl"]),
                float(row["silicon_tpot_ms"]),
            )


def model_of(path: str, dtype: str, configs: Path) -> PlannedModel | None:
    """Returns the model from its published configuration; None: it is not a dense decoder of a known family."""
    if path in _SIZES:
        return PlannedModel.parse(f"{_SIZES[path]}:{dtype}")
    file = configs / f"{path.replace('/', '--')}_config.json"
    if not file.exists():
        return None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
        try:
            return PlannedModel.of(path.rpartition("/")[2], ModelConfig.from_folder(Path(folder)), dtype)
        except ConfigurationError:
            return None


@dataclass(frozen=True, slots=True)
class Cell:
    """Ratios of predicted to reported times per output token."""

    model: str
    server: str
    gpus: str
    measured_kernels: list[float]
    formula: list[float]

    def __str__(self) -> str:
        each = " | ".join(
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            for ratios in (self.measured_kernels, self.formula)
        )
        return f"| {self.model} | {self.server} | {self.gpus} | {len(self.formula)} | {each} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.published", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/published.json"))
    arguments = parser.parse_args(argv)
    folder = tables_folder(next(iter(TABLED_GPUS)))
    if folder is None:
        print("bench.published: install the extra `plan` (pip install 'outrider[plan]')", file=sys.stderr)
        return 1
    systems = folder.parent.parent
    groups: defaultdict[tuple[str, str, str, str], list[Reported]] = defaultdict(list)
    for one in reported(systems):
        groups[one.model, one.dtype, one.server, one.gpus].append(one)
    print("| model | server | GPUs | runs | measured kernels | formula |\n| --- | --- | --- | --- | --- | --- |")
    cells = []
    for (path, dtype, server, gpus), rows in sorted(groups.items()):
        model = model_of(path, dtype, systems.parent / "model_configs")
        if model is None:
            continue
        group = parse_gpus(gpus)
        by_both = [
            [row.ratio(steps) for row in rows] for steps in (step_predictor(model, group), Roofline(model, group))
        ]
        cells.append(Cell(f"{model.name}, {dtype}", server, gpus, *by_both))
        print(cells[-1], flush=True)
    for name in ("measured_kernels", "formula"):
        ratios = [ratio for cell in cells for ratio in getattr(cell, name)]
        share = sum(abs(ratio - 1) <= _NEAR for ratio in ratios) / len(ratios)
        print(f"{name}: {share:.0%} of {len(ratios)} runs within {_NEAR:.0%}")
    write_cells(arguments.out, "bench.published", argv, [asdict(cell) for cell in cells])
    return 0


if __name__ == "__main__":
    sys.exit(main())
