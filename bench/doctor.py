"""Does the doctor name what a cluster suffers from, and what it costs? `python -m bench.doctor --pair DIR`.

Five sicknesses, each at two strengths, are given to a cluster of the pair that `bench.models` makes. Of each the
doctor, with the report of the healthy cluster as its baseline, reports what is wrong and, where that can be predicted,
what the cluster would give without it. Before and after, it and the same cluster in health answer the same prompts in
turn, which shows what it did cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bench.machine import describe_machine
from bench.models import Widening, widen_model
from bench.speedup import MEASURED, READY_TIMEOUT_SECONDS
from cluster.config.file import load_config
from cluster.diagnosis.measurements import Workload
from cluster.engine.model_config import ModelConfig
from services.doctor.cli import examine_cluster, read_prompts, survival_of
from services.doctor.report import DoctorReport
from services.launch.local import LocalCluster
from services.running_cluster.access import Access
from services.running_cluster.load import LoadMaker
from services.running_cluster.workers import look_around

_PYTORCH = {"format": "pt"}
_STREAMS = 4
_COMPARED_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Sickness:
    name: str  # as the doctor calls it
    strength: str
    settings: tuple[str, ...]
    num_streams: int = _STREAMS


def sicknesses(pair: Path, folder: Path) -> list[Sickness]:
    slow = {size: _slow_draft(pair, folder / f"slow-{size}", size) for size in (4096, 12288)}
    wrong = {noise: _wrong_draft(pair, folder / f"wrong-{noise}", noise) for noise in (1.2, 100.0)}
    block = 2 * 16 * ModelConfig.from_folder(pair / "target").kv_size * 2 * _num_layers(pair / "target")
    return [
        *(Sickness("low acceptance", f"noise {noise:g}", (f"draft.model={at}",)) for noise, at in wrong.items()),
        *(Sickness("draft the bottleneck", f"MLP of {size}", (f"draft.model={at}",)) for size, at in slow.items()),
        *(Sickness("network dominates", f"{ms} ms", (f"simulation.round_trip_ms={ms}",)) for ms in (8, 25)),
        *(
            Sickness("KV cache exhausted", f"{blocks} blocks", (f"target.kv_cache_bytes={blocks * block}",), 8)
            for blocks in (56, 32)
        ),
        *(
            Sickness("threads oversubscribed", f"{threads} threads", (f"target.threads={threads}",))
            for threads in (4, 8)
        ),
    ]


def _num_layers(folder: Path) -> int:
    return ModelConfig.from_folder(folder).num_layers


def _slow_draft(pair: Path, folder: Path, intermediate_size: int) -> Path:
    """Writes a larger model to `folder` that computes the same function as the pair's draft."""
    draft = pair / "draft"
    widen_model(draft, folder, Widening(ModelConfig.from_folder(draft), 4, intermediate_size))
    return folder


def _wrong_draft(pair: Path, folder: Path, noise: float) -> Path:
    """Writes the pair's draft to `folder` with `noise` in its matrices, in standard deviations of their weights."""
    draft = pair / "draft"
    widen_model(draft, folder, Widening(ModelConfig.from_folder(draft), 1, _intermediate_size(draft)))
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and "layers" in name:
            weights = tensor.float()
            shaken = weights + noise * weights.std() * torch.randn(weights.shape, generator=generator)
            tensors[name] = (shaken / (1.0 + noise**2) ** 0.5).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", _PYTORCH)
    return folder


def _intermediate_size(folder: Path) -> int:
    size: int = json.loads((folder / "config.json").read_text(encoding="utf-8"))["intermediate_size"]
    return size


@dataclass(frozen=True, slots=True)
class Outcome:
    sickness: Sickness
    report: DoctorReport
    sick: list[float]  # tokens a second, by repeat
    healthy: list[float]

    @property
    def loss(self) -> float:
        """The middle of the repeats'."""
        return statistics.median(1.0 - sick / well for sick, well in zip(self.sick, self.healthy, strict=True))

    @property
    def named(self) -> str:
        return self.report.findings[0].name if self.report.findings else "nothing"

    @property
    def predicted(self) -> float | None:
        """The loss of the first finding; None: nothing was found, or its loss cannot be predicted."""
        return self.report.findings[0].loss if self.report.findings else None

    def row(self) -> str:
        predicted = "none" if self.predicted is None else f"{self.predicted:.2f}"
        off = "" if self.predicted is None else f"{100 * (self.predicted / self.loss - 1.0):+.0f} %"
        others = ", ".join(finding.name for finding in self.report.findings[1:])
        fall = self.report.waterfall
        unexplained = "" if fall is None else f"{100 * fall.unexplained:+.1f} %"
        sick, healthy = statistics.median(self.sick), statistics.median(self.healthy)
        return (
            f"| {self.sickness.name} | {self.sickness.strength} | {sick:.0f} | {healthy:.0f} | {self.loss:.2f} "
            f"| {self.named} | {predicted} | {off} | {others} | {unexplained} |"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "sickness": self.sickness.name,
            "strength": self.sickness.strength,
            "sick_tokens_per_second": self.sick,
            "healthy_tokens_per_second": self.healthy,
            "loss": self.loss,
            **_examined(self.report),
        }


def _examined(report: DoctorReport) -> dict[str, Any]:
    return {"examination": asdict(report.found), "report": report.to_json()}


_HEADER = (
    "| sickness | strength | tokens/s | in health | loss | named first | predicted loss | off | named too | waterfall, "
    "unexplained |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    base = [
        *MEASURED,
        *(f"{pool}.model={arguments.pair / pool}" for pool in ("target", "draft")),
        "draft.placement=pool",
        *arguments.overrides,
    ]
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name, LocalCluster(load_config(None, base)) as healthy:
        healthy.wait_ready(READY_TIMEOUT_SECONDS)
        report = _examine(healthy.url, _STREAMS, arguments)
        print(report.text() + "\n\n" + _HEADER, flush=True)
        for sickness in sicknesses(arguments.pair, Path(name)):
            if arguments.only and sickness.name not in arguments.only:
                continue
            with LocalCluster(load_config(None, [*base, *sickness.settings])) as sick:
                sick.wait_ready(READY_TIMEOUT_SECONDS)
                comparison = _Comparison(sick.url, healthy.url, sickness.num_streams, arguments.repeats)
                comparison.run(arguments.repeats // 2)
                found = _examine(sick.url, sickness.num_streams, arguments, survival_of(report.to_json(), 0.0))
                comparison.run(arguments.repeats - arguments.repeats // 2)
            outcomes.append(Outcome(sickness, found, comparison.sick, comparison.healthy))
            print(outcomes[-1].row(), flush=True)
            _write(arguments.out, report, outcomes)
    return 0


def _examine(url: str, num_streams: int, arguments: argparse.Namespace, earlier: Sequence[float] = ()) -> DoctorReport:
    return examine_cluster(
        url,
        num_streams=num_streams,
        temperatures=(0.0,),  # no loss is told from how others compare
        seconds=arguments.seconds,
        repeats=arguments.examinations,
        earlier_survival=earlier,
    )


class _Comparison:
    """Tokens a second of both, in turn, with the controller's k; half of it before the examination, half after, as a
    machine is not as fast in one minute as in the next."""

    def __init__(self, sick: str, healthy: str, num_streams: int, num_repeats: int) -> None:
        self.sick: list[float] = []
        self.healthy: list[float] = []
        self._workload = Workload(num_streams, 0.0, None)
        self._num_repeats = num_repeats
        self._makers = [LoadMaker(look_around(url, Access()), read_prompts(None), 96) for url in (sick, healthy)]

    def run(self, num_repeats: int) -> None:
        for _ in range(num_repeats):
            part = len(self.sick)
            for maker, rates in zip(self._makers, (self.sick, self.healthy), strict=True):
                grown = maker.run(self._workload, _COMPARED_SECONDS, part=part, num_parts=self._num_repeats)
                rates.append(maker.measured(self._workload, grown).counts.tokens_per_second)


def _write(path: Path, healthy: DoctorReport, outcomes: Sequence[Outcome]) -> None:
    document = {
        "machine": describe_machine(),
        "healthy": _examined(healthy),
        "sick": [outcome.to_json() for outcome in outcomes],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.doctor", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pair", type=Path, required=True, help="folder that `bench.models` wrote")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--only", nargs="+", help="of the sicknesses, by the doctor's names")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each of the doctor's loads")
    parser.add_argument("--examinations", type=int, default=3, help="how often the doctor repeats its loads")
    parser.add_argument("--repeats", type=int, default=3, help="of the comparison of sick and healthy")
    parser.add_argument("--out", type=Path, default=Path("bench/results/doctor.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
