"""Computes lower bounds of steps on GPUs from their data sheets: `python -m bench.roofline`.

Bounds are for a verify step of 1 to 64 rows a sequence and for a draft's burst, with 1 to 256 sequences. A kernel takes
its bytes over the bandwidth or its operations over the peak, whichever is longer (`cluster.planning.kernels`). Kernels
run one after the other. A cell has the sum in milliseconds and its largest part. On several GPUs all-reduces are added
as in the planner: this is an assumption, not from a data sheet. Nothing is measured here. The steps that
`make gpu-check` has measured are listed too, relative to their bounds.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.engine import CONTEXT_LEN
from bench.gpu_rows import PAIR_INTERMEDIATE_SIZE, PAIR_WIDTH_FACTOR
from bench.models import Widening
from bench.result import write_result
from cluster.config import Config
from cluster.engine.memory_plan import Budget, Memory, PlannedModel, Tenant
from cluster.engine.model_config import ModelConfig
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder
from cluster.planning.hardware import GPUS, GpuGroup, parse_gpus
from cluster.planning.kernels import Segments, Step, burst_step, sampling, step_kernels
from cluster.planning.steps import ASSUMED, Efficiency, Roofline

ROWS = (1, 2, 4, 8, 16, 32, 64)  # of a sequence
NUM_SEQS = (1, 4, 16, 64, 256)
DEPTHS = (4, 8)  # of a burst
LETTERS = {"weights": "W", "KV": "K", "logits": "L", "arithmetic": "A", "all-reduces": "R", "fixed": "F"}
_MEMORY_SHARE, _BLOCK_SIZE = 0.9, 16


@dataclass(frozen=True, slots=True)
class Bound:
    """Lower bound of a step or of a burst of steps, in milliseconds."""

    num_seqs: int
    rows: int  # of a sequence in a step
    num_steps: int
    ms: float
    ms_by_part: dict[str, float]
    ms_kv_once: float  # if no tile's reading of what another has read came from memory
    fits: bool  # the GPUs have memory for it

    @property
    def largest(self) -> str:
        return max(self.ms_by_part, key=lambda part: self.ms_by_part[part])

    @property
    def cell(self) -> str:
        return f"{self.ms:{'.0f' if self.ms >= 100 else '.3g'}} {LETTERS[self.largest]}{'' if self.fits else '*'}"


@dataclass(frozen=True, slots=True)
class Case:
    """A model on GPUs."""

    model: PlannedModel
    gpus: GpuGroup
    cached_tokens: int
    all_reduce_seconds: float
    logit_passes: int = 1

    @property
    def name(self) -> str:
        return f"{self.model.name} {self.model.dtype} on {self.gpus.name}"

    def verify(self, num_seqs: int, rows: int) -> Bound:
        return self._bound(num_seqs, rows, 1, (Segments(num_seqs, rows, self.cached_tokens),))

    def burst(self, num_seqs: int, depth: int) -> Bound:
        return self._bound(num_seqs, 1, depth, burst_step(num_seqs, self.cached_tokens, depth))

    def _bound(self, num_seqs: int, rows: int, num_steps: int, step: Step) -> Bound:
        roofline = _roofline(self.model, self.gpus, self.all_reduce_seconds, self.logit_passes)
        parts = {name: 1e3 * num_steps * seconds for name, seconds in roofline.parts(step).items()}
        ms = sum(parts.values())
        memory = Memory(self.gpus.memory_gb, _MEMORY_SHARE, _BLOCK_SIZE)
        budget = Budget((Tenant("model", self.model, rows * num_steps),), memory)
        fits = budget.largest_batch(self.cached_tokens) >= num_seqs
        return Bound(num_seqs, rows, num_steps, ms, parts, ms - 1e3 * num_steps * _read_again(roofline, step), fits)


def _roofline(model: PlannedModel, gpus: GpuGroup, all_reduce_seconds: float, logit_passes: int = 1) -> Roofline:
    """All of the data sheet's bandwidth and peak."""
    return Roofline(model, gpus, Efficiency(1.0, 1.0, all_reduce_seconds, 0.0), logit_passes)


def _read_again(roofline: Roofline, step: Step) -> float:
    """Seconds that attention is bound by reading more than once."""
    _, attention, _ = step_kernels(roofline.model, step)
    least = max(attention.bytes_once / roofline.gpus.bytes_per_second, roofline.compute_seconds(attention))
    return max(0.0, roofline.read_seconds(attention) - least)


@dataclass(frozen=True, slots=True)
class Compared:
    """Step measured on a GPU, with its bound and the planner's prediction, in milliseconds."""

    model: str
    num_seqs: int
    rows: int
    bound_ms: float
    planned_ms: float
    measured_ms: float

    @property
    def measured_over_bound(self) -> float:
        return self.measured_ms / self.bound_ms

    @property
    def measured_over_planned(self) -> float:
        return self.measured_ms / self.planned_ms


def measured_models() -> dict[str, PlannedModel]:
    """The pair of `make gpu-check`."""
    config = Config()
    narrow = ModelConfig.from_folder(resolve_model_folder(config.target.model))
    wide = Widening(narrow, PAIR_WIDTH_FACTOR, PAIR_INTERMEDIATE_SIZE).new
    return {
        "target": PlannedModel.of("4.2B", wide, "bf16"),
        "draft": PlannedModel.parse(f"{config.draft_model}:bf16"),
    }


def compare(results: Path) -> tuple[GpuGroup, list[Compared]]:
    """The steps in bfloat16 of `gpu-engine-*.json` under `results`, on the GPU that `gpu.json` of the same run names.
    Their contexts hold the rows that are computed (`bench.engine`)."""
    gpus = _gpu_of(json.loads((results / "gpu.json").read_text(encoding="utf-8"))["machine"]["gpu"])
    compared = []
    for role, model in measured_models().items():
        document = json.loads((results / f"gpu-engine-{role}.json").read_text(encoding="utf-8"))
        for row in document["steps"]:
            if row["weights"] != "bfloat16":
                continue
            num_seqs, rows = row["num_sequences"], row["num_tokens"]
            step = (Segments(num_seqs, rows, CONTEXT_LEN - rows),)
            bound, planned = _roofline(model, gpus, 0.0).seconds(step), Roofline(model, gpus, ASSUMED).seconds(step)
            compared.append(Compared(model.name, num_seqs, rows, 1e3 * bound, 1e3 * planned, row["milliseconds"]))
    return gpus, compared


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampler's time on a GPU, with PyTorch's operators, and the bound of the Triton kernels. Milliseconds."""

    vocab_size: int
    temperature: float
    rows: int
    bound_ms: float
    measured_ms: float

    @property
    def measured_over_bound(self) -> float:
        return self.measured_ms / self.bound_ms


def compare_sampling(results: Path) -> list[Sampled]:
    """The times of `gpu.json` under `results`, without filters."""
    document = json.loads((results / "gpu.json").read_text(encoding="utf-8"))
    gpus, model = _gpu_of(document["machine"]["gpu"]), PlannedModel.parse("1B")
    compared = []
    for row in document["rows"]:
        if not (vocabulary := re.fullmatch(r"coupled sampling, vocabulary of (\d+)", row["check"])):
            continue
        assert model.steps is not None
        own = replace(model, steps=replace(model.steps, vocab_size=int(vocabulary[1])))
        for name, ms in row["figures"].items():
            if found := re.fullmatch(r"ms, T=([\d.]+), (\d+) rows", name):
                bound = _roofline(own, gpus, 0.0).read_seconds(sampling(own, int(found[2])))
                compared.append(Sampled(int(vocabulary[1]), float(found[1]), int(found[2]), 1e3 * bound, ms))
    return compared


def sampling_table(compared: Sequence[Sampled]) -> str:
    head = ["vocabulary", "T", "rows", "bound ms", "measured", "measured / bound"]
    lines = [_line(head), _line(["---"] * len(head))]
    for one in compared:
        cells = [f"{one.vocab_size:,}", f"{one.temperature:g}", str(one.rows), f"{one.bound_ms:.2g}"]
        lines.append(_line([*cells, f"{one.measured_ms:.3g}", f"{one.measured_over_bound:.2g}"]))
    return "\n".join(lines)


def _gpu_of(name: str) -> GpuGroup:
    """Returns the GPU with PyTorch's `name`, such as `NVIDIA H100 80GB HBM3`.

    Raises ConfigurationError if it is not known.
    """
    for known in GPUS:
        if known in name.split():
            return parse_gpus(known)
    raise ConfigurationError(f"gpu.json is of a {name!r}, whose data sheet is not in cluster/planning/hardware.py")


def verify_table(case: Case) -> str:
    rows = [(str(rows), [case.verify(num_seqs, rows).cell for num_seqs in NUM_SEQS]) for rows in ROWS]
    return _table("rows a sequence", rows)


def burst_table(cases: Sequence[Case]) -> str:
    rows = [
        (f"{case.name}, k = {depth}", [case.burst(num_seqs, depth).cell for num_seqs in NUM_SEQS])
        for case in cases
        for depth in DEPTHS
    ]
    return _table("burst", rows)


def _table(corner: str, rows: Sequence[tuple[str, list[str]]]) -> str:
    head = [corner, *(f"{count} sequence{'s' if count > 1 else ''}" for count in NUM_SEQS)]
    return "\n".join(_line(cells) for cells in (head, ["---"] * len(head), *([name, *cells] for name, cells in rows)))


def compared_table(compared: Sequence[Compared]) -> str:
    head = ["model", "sequences x rows", "bound ms", "planned", "measured", "measured / bound", "measured / planned"]
    lines = [_line(head), _line(["---"] * len(head))]
    for one in compared:
        times = [f"{ms:.3g}" for ms in (one.bound_ms, one.planned_ms, one.measured_ms)]
        ratios = [f"{ratio:.3g}" for ratio in (one.measured_over_bound, one.measured_over_planned)]
        lines.append(_line([one.model, f"{one.num_seqs} x {one.rows}", *times, *ratios]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cases_of(model: str, gpus: str, arguments: argparse.Namespace) -> Iterator[Case]:
    """Raises ConfigurationError."""
    for name in gpus.split(","):
        yield Case(
            PlannedModel.parse(model),
            parse_gpus(name),
            arguments.context,
            arguments.all_reduce_us / 1e6,
            arguments.logit_passes,
        )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        targets = [case for model, gpus in arguments.target or _TARGETS for case in cases_of(model, gpus, arguments)]
        draft, draft_gpus = arguments.draft
        drafts = list(cases_of(draft, draft_gpus, arguments))
    except ConfigurationError as error:
        print(f"bench.roofline: {error}", file=sys.stderr)
        return 2
    letters = ", ".join(f"{letter} {part}" for part, letter in LETTERS.items() if part != "fixed")
    print(f"Bounds in ms; most of it: {letters}; * not in {_MEMORY_SHARE:g} of the memory. {arguments.context} tokens")
    print(f"cached; an all-reduce of {arguments.all_reduce_us:g} us, two a layer, on several GPUs (assumed)")
    for case in targets:
        print(f"\nverify, {case.name}\n\n{verify_table(case)}")
    print(f"\na draft's burst\n\n{burst_table(drafts)}")
    gpus, compared = compare(arguments.results)
    print(f"\nmeasured on one {gpus.name} with PyTorch's operators\n\n{compared_table(compared)}")
    sampled = compare_sampling(arguments.results)
    print(f"\nits sampler\n\n{sampling_table(sampled)}")
    document = _document(arguments, targets, drafts, gpus, compared, sampled)
    write_result(arguments.out, document)
    return 0


def _document(
    arguments: argparse.Namespace,
    targets: Sequence[Case],
    drafts: Sequence[Case],
    gpus: GpuGroup,
    compared: Sequence[Compared],
    sampled: Sequence[Sampled],
) -> dict[str, Any]:
    def entries(bounds: Iterator[Bound]) -> list[dict[str, Any]]:
        return [asdict(bound) | {"largest": bound.largest} for bound in bounds]

    return {
        "cached_tokens": arguments.context,
        "all_reduce_us": arguments.all_reduce_us,
        "logit_passes": arguments.logit_passes,
        "verify": {case.name: entries(case.verify(s, r) for r in ROWS for s in NUM_SEQS) for case in targets},
        "burst": {case.name: entries(case.burst(s, k) for k in DEPTHS for s in NUM_SEQS) for case in drafts},
        "measured_on": gpus.name,
        "measured": [
            asdict(one)
            | {"measured_over_bound": one.measured_over_bound, "measured_over_planned": one.measured_over_planned}
            for one in compared
        ],
        "sampling": [asdict(one) | {"measured_over_bound": one.measured_over_bound} for one in sampled],
    }


_TARGETS = (("70B:bf16", "4xA100-80,4xH100,4xH200"), ("8B:bf16", "A10G,L4"))
_DRAFT = ("1B:bf16", "A10G,L4,A100-80,H100,H200")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench.roofline",
        description=(__doc__ or "").partition("\n")[0],
        epilog="MODEL and GPUS are those of `outrider plan cluster`, several GPUS with commas between them.",
    )
    metavar = ("MODEL", "GPUS")
    parser.add_argument(
        "--target", nargs=2, action="append", metavar=metavar, help=f"may be repeated; default {_TARGETS}"
    )
    parser.add_argument("--draft", nargs=2, default=_DRAFT, metavar=metavar, help=f"default {_DRAFT}")
    parser.add_argument("--context", type=int, default=1000, metavar="TOKENS", help="of each sequence; default 1000")
    parser.add_argument("--all-reduce-us", type=float, default=1e6 * ASSUMED.all_reduce_seconds, metavar="US")
    parser.add_argument(
        "--logit-passes", type=int, default=1, metavar="N", help="passes of the sampler over the logits; default 1"
    )
    parser.add_argument("--results", type=Path, default=Path("bench/results"), help="where measured steps are")
    parser.add_argument("--out", type=Path, default=Path("bench/results/roofline.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
