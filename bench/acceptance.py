"""Compares coupled acceptance with the classical rules, greedy and rejection: `python -m bench.acceptance`.

One stream, fixed k. Each rule has a cluster of its own. All of them are up, only one works at a time, and repeats are
interleaved. Rates are medians with their range; the other figures are over all repeats. A probability is 4 bytes. For
rejection the target runs a copy of the draft: a draft worker that sent probabilities instead would send k rows of the
vocabulary a round.

Memory is the target worker's: the configured weights and KV cache of the target, those of the draft's copy that
rejection needs there, and the resident memory of the process at the end.

A draft with a foreign tokenizer: `--set draft.model=DIR --acceptances coupled greedy`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.machine import describe_machine
from bench.speedup import MEASURED, READY_TIMEOUT_SECONDS, Depth
from bench.workload import Run, held_out_prompts, run_streams
from cluster.config import Config
from cluster.config.file import load_config
from cluster.config.workers import WorkerConfig
from cluster.engine.loader import resolve_device, resolve_dtype
from cluster.engine.memory_plan import PlannedModel
from cluster.engine.model_config import ModelConfig
from cluster.engine.runner import kv_cache_budget
from cluster.model_folder import resolve_model_folder
from services.launch.local import LocalCluster

ACCEPTANCES = ("coupled", "greedy", "rejection")
BYTES_OF_PROBABILITY = 4
_PLANNED_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a target worker takes."""

    target: float  # weights and KV cache
    draft_copy: float  # likewise
    resident: float  # of the process, everything included

    @classmethod
    def of(cls, cluster: LocalCluster) -> Memory:
        config = cluster.config
        has_copy = config.speculation.acceptance == "rejection"
        return cls(
            target=_configured_bytes(config.target),
            draft_copy=_configured_bytes(config.draft) if has_copy else 0.0,
            resident=_resident_bytes(cluster.targets[0].pid),
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One acceptance at one temperature."""

    acceptance: str
    temperature: float
    measured: Depth
    memory: Memory
    shipped_bytes: int  # a round, if probabilities were sent; 0 where nobody needs them

    def to_json(self) -> dict[str, Any]:
        return {
            "acceptance": self.acceptance,
            "temperature": self.temperature,
            "tokens_per_second": self.measured.tokens_per_second,
            "acceptance_rate": self.measured.acceptance_rate,
            "acceptance_length": self.measured.acceptance_length,
            "mean_drafts": self.measured.mean_drafts,
            "bytes_per_committed_token": self.measured.bytes_per_token,
            "shipped_probability_bytes_per_round": self.shipped_bytes,
            "verify_step_ms": self.measured.step_ms("outrider_step", ":verify"),
            "target_bytes": self.memory.target,
            "draft_copy_bytes": self.memory.draft_copy,
            "resident_bytes": self.memory.resident,
        }

    def __str__(self) -> str:
        rates, memory = self.measured.tokens_per_second, self.memory
        return (
            f"| {self.acceptance} | {self.temperature:g} | {self.measured.acceptance_rate:.3f} "
            f"| {self.measured.acceptance_length:.2f} | {self.measured.bytes_per_token:.1f} "
            f"| {self.shipped_bytes or '-'} "
            f"| {statistics.median(rates):.0f} ({min(rates):.0f}-{max(rates):.0f}) "
            f"| {self.measured.step_ms('outrider_step', ':verify'):.2f} "
            f"| {memory.target / 1e6:.0f} + {memory.draft_copy / 1e6:.0f} | {memory.resident / 1e6:.0f} |"
        )


def main() -> None:
    arguments = _parser().parse_args()
    configs = [
        load_config(None, [*MEASURED, *arguments.overrides, *_settings(acceptance, arguments)])
        for acceptance in arguments.acceptances
    ]
    print(
        f"{configs[0].target.model} drafted by {configs[0].draft.model}, k = {arguments.k}, one stream, "
        f"{arguments.repeats} repeats\n\n"
        "| acceptance | T | accepted / drafted | acceptance length | bytes/token | bytes a round with probabilities "
        "| tokens/s | verify ms | target MB, weights and KV + draft's copy | resident MB |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        clusters = [stack.enter_context(LocalCluster(config)) for config in configs]
        for cluster in clusters:
            cluster.wait_ready(READY_TIMEOUT_SECONDS)
        for temperature in arguments.temperatures:
            new_rows = measure(clusters, temperature, arguments)
            rows += new_rows
            print(*new_rows, sep="\n", flush=True)
    document = {
        "target": configs[0].target.model_dump(mode="json"),
        "draft": configs[0].draft.model_dump(mode="json"),
        "k": arguments.k,
        "repeats": arguments.repeats,
        "max_tokens": arguments.max_tokens,
        "machine": describe_machine(),
        "rows": [row.to_json() for row in rows],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _settings(acceptance: str, arguments: argparse.Namespace) -> tuple[str, ...]:
    return (
        f"speculation.acceptance={acceptance}",
        f"speculation.num_speculative_tokens={arguments.k}",
        "speculation.controller=fixed",
    )


def measure(clusters: Sequence[LocalCluster], temperature: float, arguments: argparse.Namespace) -> list[Row]:
    """Runs all clusters in turn, as `arguments` (k, prompts, repeats, max_tokens) say."""
    model = clusters[0].config.target.model
    prompts = held_out_prompts(arguments.prompts, seed=1, model=model)

    def run(cluster: LocalCluster, prompts: Sequence[Sequence[int]]) -> Run:
        return run_streams(
            cluster.url,
            prompts,
            num_streams=1,
            temperature=temperature,
            num_speculative_tokens=arguments.k,
            max_tokens=arguments.max_tokens,
        )

    measured = [Depth(arguments.k) for _ in clusters]
    for cluster in clusters:
        run(cluster, held_out_prompts(2, seed=2, model=model))
    for _ in range(arguments.repeats):
        for cluster, depth in zip(clusters, measured, strict=True):
            depth.add_repeat(cluster, partial(run, cluster, prompts))
    return [
        _row(cluster.config, temperature, depth, Memory.of(cluster), arguments.k)
        for cluster, depth in zip(clusters, measured, strict=True)
    ]


def _row(config: Config, temperature: float, measured: Depth, memory: Memory, k: int) -> Row:
    acceptance = config.speculation.acceptance
    vocab_size = ModelConfig.from_folder(resolve_model_folder(config.target.model)).vocab_size
    needs_probabilities = acceptance == "rejection" and temperature > 0
    shipped_bytes = vocab_size * k * BYTES_OF_PROBABILITY if needs_probabilities else 0
    return Row(acceptance, temperature, measured, memory, shipped_bytes)


def _configured_bytes(worker: WorkerConfig) -> float:
    """Weights and KV cache."""
    device = resolve_device(worker.device)
    dtype = worker.quantization or _PLANNED_DTYPES[resolve_dtype(worker.dtype, device)]
    model = PlannedModel.parse(f"{resolve_model_folder(worker.model)}:{dtype}")
    return model.weight_bytes + kv_cache_budget(worker, device)


def _resident_bytes(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    (kilobytes,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))
    return 1024.0 * int(kilobytes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.acceptance", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument(
        "--acceptances",
        nargs="+",
        choices=ACCEPTANCES,
        default=list(ACCEPTANCES),
        metavar="NAME",
        help="rejection needs a draft with the target's tokenizer",
    )
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument(
        "--temperatures", type=lambda text: [float(part) for part in text.split(",")], default=[0.0, 0.7, 1.0]
    )
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=Path("bench/results/acceptance.json"))
    return parser


if __name__ == "__main__":
    main()
