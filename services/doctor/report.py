"""The doctor's findings, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.diagnosis.findings import GOOD_ACCEPTANCE, MAX_COST_RATIO, MIN_ACCEPTANCE, Finding
from cluster.diagnosis.measurements import Examination, Measured
from cluster.diagnosis.speed import SpeedModel
from cluster.diagnosis.waterfall import Waterfall
from services.doctor.examine import REPORTED_DEPTH
from services.running_cluster.workers import ClusterFacts, WorkerFacts
from services.terminal import as_lines

_BAR_WIDTH = 30


@dataclass(frozen=True, slots=True)
class DoctorReport:
    facts: ClusterFacts
    found: Examination
    findings: Sequence[Finding]  # in the order of repair
    waterfall: Waterfall | None  # None: there were no drafts

    def text(self) -> str:
        """Returns the report for a terminal."""
        parts = [self._programs(), self._gains(), self._findings()]
        if self.waterfall is not None:
            shown = _show(self.waterfall, self.found.auto.workload.temperature)
            parts = [self._programs(), self._suitability(), self._gains(), shown, self._findings()]
        return "\n\n".join(map(as_lines, parts))

    def to_json(self) -> dict[str, Any]:
        speed, fall = SpeedModel.of(self.found), self.waterfall
        return {
            "url": self.facts.url,
            "model": self.facts.model,
            "workers": [
                {"pool": worker.pool, "address": worker.address, "model": worker.model.name}
                for worker in self.facts.workers
            ],
            "num_streams": self.found.auto.workload.num_streams,
            "temperature": self.found.auto.workload.temperature,
            "tokens_per_second": self.found.auto.counts.tokens_per_second,
            "tokens_per_second_without": self.found.plain.counts.tokens_per_second,
            "draft_cost_ratio": speed.draft_seconds / speed.step_seconds(0),
            "break_even_acceptance": speed.break_even_acceptance(),
            "suitability": [
                {"temperature": one.workload.temperature, "survival": list(one.counts.survival)}
                for one in self.found.temperatures
            ],
            "findings": [asdict(finding) for finding in self.findings],
            "waterfall": fall and asdict(fall) | {"unexplained": fall.unexplained},
        }

    def _programs(self) -> list[str]:
        rows = [f"{self.facts.model} at {self.facts.url} (Outrider {self.facts.version})"]
        rows += [f"  {_describe(worker)}" for worker in self.facts.workers]
        if not self.facts.drafts:
            rows.append("  no draft workers: the target's process drafts, or nothing does")
        return rows

    def _suitability(self) -> list[str]:
        speed, even = SpeedModel.of(self.found), SpeedModel.of(self.found).break_even_acceptance()
        ratio = speed.draft_seconds / speed.step_seconds(0)
        rows = ["Does the draft suit? Share of the rounds in which the draft token at each place was committed:"]
        rows += [f"  T = {one.workload.temperature:g}: {_survival(one)}" for one in self.found.temperatures]
        rows.append(
            f"  a draft step takes {1e3 * speed.draft_seconds:.2f} ms, {100 * ratio:.1f} % of a target's "
            f"({1e3 * speed.step_seconds(0):.2f}); it should be under {100 * MAX_COST_RATIO:.0f} %"
        )
        rows.append(
            f"  {speed.acceptance(REPORTED_DEPTH):.2f} of the draft tokens that are looked at are accepted; it "
            f"should be over {MIN_ACCEPTANCE:g}, and {GOOD_ACCEPTANCE:g} is good; "
            + ("drafts pay at no acceptance" if even is None else f"below {even:.2f} no k pays")
        )
        return rows

    def _gains(self) -> list[str]:
        plain, auto = self.found.plain.counts, self.found.auto.counts
        rows = [f"Tokens per second of each target, {self.found.auto.workload.num_streams} streams on it:"]
        rows.append(f"  without drafts {plain.tokens_per_second:.0f}")
        for one in sorted(self.found.fixed, key=lambda one: one.workload.num_speculative_tokens or 0):
            rows.append(f"  k = {one.workload.num_speculative_tokens}: {_gain(one, self.found.plain)}")
        rows.append(f"  as the controller has it: {_gain(self.found.auto, self.found.plain)}, k {auto.mean_depth:.1f}")
        return rows

    def _findings(self) -> list[str]:
        if not self.findings:
            return ["No problem found."]
        rows = ["Problems, in the order of repair:"]
        for number, finding in enumerate(self.findings, 1):
            cost = "its cost cannot be predicted"
            if finding.loss is not None and finding.tokens_per_second is not None:
                cost = f"costs {100 * finding.loss:.0f} %: repaired, about {finding.tokens_per_second:.0f} tokens/s"
            rows += [f"  {number}. {finding.name} ({cost})", f"     {finding.what}", f"     remedy: {finding.remedy}"]
        return rows


def _show(fall: Waterfall, temperature: float) -> list[str]:
    widest = max(fall.promised, fall.measured, *(stage.speedup for stage in fall.stages))
    rows = [f"From the formula's speedup to the measured one (one k for all, T = {temperature:g}):"]
    rows.append(f"  {'the formula':46} {fall.promised:5.2f} {_bar(fall.promised, widest)}")
    for stage in fall.stages:
        rows.append(f"  {stage.cause:46} {-stage.loss:+5.2f} {_bar(stage.speedup, widest)}")
    rows.append(f"  {'measured':46} {fall.measured:5.2f} {_bar(fall.measured, widest)}")
    rows.append(f"  not explained: {100 * fall.unexplained:+.1f} % of the measured")
    return rows


def _describe(worker: WorkerFacts) -> str:
    machine = worker.machine
    threads = f"{machine.num_threads} threads on {len(machine.cpus)} cores"
    kernels = machine.instruction_set or "PyTorch's operators"
    links = f", {worker.num_links} of {worker.num_links_configured} links" if worker.pool == "target" else ""
    blocks = f", {worker.load.num_blocks} KV blocks" if worker.load.num_blocks else ""
    return f"{worker.name} on {machine.host}: {worker.model.name}, {threads}, {kernels}{blocks}{links}"


def _survival(one: Measured) -> str:
    places = " ".join(f"{share:.2f}" for share in one.counts.survival[: one.workload.num_speculative_tokens])
    return f"{places or 'no drafts'}; {one.counts.tokens_per_round:.2f} tokens a round"


def _gain(one: Measured, plain: Measured) -> str:
    rate = one.counts.tokens_per_second
    return f"{rate:.0f} ({rate / max(plain.counts.tokens_per_second, 1e-9):.2f} times)"


def _bar(value: float, widest: float) -> str:
    return "█" * max(0, round(_BAR_WIDTH * value / widest))
