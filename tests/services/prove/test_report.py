"""The report: ratios with their spread, what to use, tokens that differ, what is missing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cluster.config.file import load_config
from cluster.planning.prediction import ExpectedLoad, Option
from cluster.planning.round_costs import Drafting
from cluster.planning.steps import MeasuredSteps
from services.prove.figures import quantile
from services.prove.measure import Results
from services.prove.predict import Forecast
from services.prove.report import ProofReport
from services.prove.systems import BESIDE, PLAIN, REMOTE, STOCK
from services.prove.verdict import ratio, verdicts
from tests.services.prove.experiments import SYSTEMS, result, results
from tests.services.prove.servers import StubSystem

FAST: Mapping[str, Sequence[float]] = {STOCK: [50, 60], PLAIN: [100, 100], BESIDE: [120, 140], REMOTE: [180, 190]}


def report(measured: Results, **values: Any) -> ProofReport:
    systems = [StubSystem(name, []) for name in measured.systems]
    made = ProofReport(measured.experiment, systems, measured, True, ["outrider", "prove"], **values)
    made.predicted_at = made.ended_at = datetime.now(UTC)
    return made


def test_a_ratio_is_that_of_each_repeat() -> None:
    own = ratio(results({PLAIN: [100, 200], REMOTE: [150, 220]}), REMOTE, PLAIN, 1)
    assert own.values == pytest.approx((1.5, 1.1))
    assert str(own) == "1.30 (1.10 to 1.50)"
    assert str(ratio(results({PLAIN: [100], REMOTE: [150]}), REMOTE, PLAIN, 1)) == "1.50 (one repeat)"
    assert str(ratio(results({PLAIN: [100]}), REMOTE, PLAIN, 1)) == "-"


@pytest.mark.parametrize(
    ("rates", "told"),
    [
        (FAST, "use `remote`, the draft on its own device: 185 tokens/s, 1.85 (1.80 to 1.90) times `k = 0`"),
        (FAST, "That is 3.38 (3.17 to 3.60) times `vllm serve`."),
        # A second device has to be worth it in every repeat.
        (FAST | {REMOTE: [180, 139]}, "use `beside`, the draft on the target's device: 130 tokens/s"),
        (FAST | {BESIDE: [99, 140], REMOTE: [90, 95]}, "decode without drafts (`k = 0`), 100 tokens/s"),
        (FAST | {STOCK: [500, 400]}, "`vllm serve` is faster"),
        (FAST | {STOCK: [170, 200]}, "`vllm serve` is as fast within the spread"),
        (FAST | {BESIDE: [101, 102], REMOTE: [90, 95]}, "no placement gains"),
        ({PLAIN: [100]}, "1 stream: not measured."),
        ({PLAIN: [100], BESIDE: [110]}, "use `beside`"),
    ],
)
def test_the_verdict(rates: Mapping[str, Sequence[float]], told: str) -> None:
    (verdict,) = verdicts(results(rates))
    assert told in verdict


def test_a_complete_report() -> None:
    text = report(results(FAST)).markdown()
    assert "UTC: complete." in text
    assert "## Measured, 1 stream" in text
    assert "| `remote` | 185 (180 to 190) | 1.85 (1.80 to 1.90) | 3.38 (3.17 to 3.60) |" in text
    assert "All 6 answers of `k = 0`, `beside`, `remote` have the same tokens" in text
    assert "## Missing" not in text


def test_without_a_peer_and_without_streaming_there_are_no_such_columns() -> None:
    text = report(results({PLAIN: [100], REMOTE: [150]}, has_peer=False, is_streamed=False)).markdown()
    assert "times `vllm serve`" not in text
    assert "between tokens ms" not in text
    assert "answer ms, p50 / p99" in text


def test_what_is_missing_is_listed() -> None:
    measured = results(FAST)
    measured.results = [one for one in measured.results if (one.repeat, one.system) not in [(1, REMOTE), (1, STOCK)]]
    measured.problems = {STOCK: "it ended with code 1"}
    text = report(measured, stopped="the time limit of 1 minutes was reached").markdown()
    assert "not complete, as the time limit of 1 minutes was reached" in text
    assert "- Not measured: `remote` at 1 stream, repeat 2" in text
    assert "- `vllm serve` could not be measured: it ended with code 1" in text


@pytest.mark.parametrize(("numerics", "breaks"), [("invariant", True), ("fast", False)])
def test_tokens_that_differ(numerics: str, breaks: bool) -> None:
    measured = results(FAST, config=load_config(None, [f"target.numerics={numerics}"]))
    measured.results.append(result(2, REMOTE, 100, token_ids=(1, 2, 9, 9, 9)))
    own = report(measured)
    assert own.breaks_promise is breaks
    assert "| `remote` | 3 | 1 | 15 | 3 |" in own.markdown()
    assert ("promises that none differs" in own.markdown()) is breaks


def test_predicted_beside_measured() -> None:
    load = ExpectedLoad(1, 3, 6)
    target = MeasuredSteps(((1, 0.010), (100, 0.011)))
    drafting = Drafting(MeasuredSteps(((1, 0.001), (100, 0.0011))), 0.78)
    own = report(results(FAST))
    own.forecasts = [
        Forecast(PLAIN, 1, load, Option(PLAIN, target)),
        Forecast(BESIDE, 1, load, Option(BESIDE, target, drafting)),
        Forecast(REMOTE, 1, load, None, "the planner has no data sheet of FAST 1"),
    ]
    text = own.markdown()
    assert "No prediction for `remote`: the planner has no data sheet of FAST 1." in text
    prediction, _, errors = text.partition("## How far the prediction was off")
    assert "| 1 | k = 0 | 0 | 97 | 1.00 |" in prediction
    assert "| 1 | k = 0 | 97 | 100 | 0.97 |" in errors
    plan = own.forecasts[1].plan
    assert plan is not None
    # Two drafts a round and two tokens: 1 + a + a² = 2.
    assert f"| 1 | beside | {plan.tokens_per_second:.0f} | 130 |" in errors
    assert "| 0.62 |" in errors


def test_both_files_are_written(tmp_path: Path) -> None:
    own = report(results(FAST))
    own.write(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.json", "report.md"]
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["command"] == "outrider prove"
    assert found["systems"].keys() == set(SYSTEMS)
    assert len(found["results"]) == 8
    first = found["results"][0]
    assert (first["system"], first["repeat"], first["tokens_per_second"]) == (STOCK, 0, 50.0)
    assert first["answers"][0]["token_ids"] == [1, 2, 3, 4, 5]
    assert first["first_token"].keys() == {"p50", "p99"}
    assert {"started_at", "versions", "devices", "prediction", "differences", "verdicts"} <= found.keys()


def test_quantiles() -> None:
    assert quantile([], 0.5) is None
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile(list(range(1000)), 0.99) == 990


def test_a_report_before_the_prediction() -> None:
    own = replace(report(results(FAST)), predicted_at=None, ended_at=None)
    assert "No prediction was made" in own.markdown()
    assert "UTC: not complete." in own.markdown()
