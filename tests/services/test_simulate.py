"""`outrider simulate`: its example, what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from services import cli
from services.simulate.cli import EXAMPLE

HUGE = "9" * 400
QUICK = ["--streams", "3", "--seconds", "20", "--prompt-tokens", "20", "--answer-tokens", "20:40"]


def simulate(*arguments: str) -> int:
    return cli.main(["simulate", *arguments])


def test_the_example_of_its_help_works(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        simulate("--help")
    assert EXAMPLE in capsys.readouterr().out
    program, *arguments = shlex.split(EXAMPLE)
    assert program == "outrider"
    assert cli.main(arguments) == 0
    printed = capsys.readouterr()
    for part in ("tokens/s", "mean k", "targets             2", "draft workers       1", "first token", "p99"):
        assert part in printed.out
    assert "cost" not in printed.out


def test_json_has_all_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert simulate(*QUICK, "--json", str(file), "--target-dollars-per-hour", "4", "--draft-dollars-per-hour", "1") == 0
    found = json.loads(file.read_text())
    assert found["dollars_per_hour"] == 5.0
    assert found["dollars_per_million_tokens"] > 0
    assert found["seconds"] == pytest.approx(18.0, abs=0.1)
    assert found["first_token"]["p50"] <= found["first_token"]["p99"] <= found["latency"]["p99"]
    assert [interval["seconds"] for interval in found["intervals"]] == [0.0, 10.0]
    capsys.readouterr()
    assert simulate(*QUICK, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["tokens_per_second"] == found["tokens_per_second"]


def test_a_trace_is_answered_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [{"arrival_seconds": 0.5 * i, "prompt_tokens": 10 + i, "answer_tokens": 8} for i in range(12)]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert simulate("--trace", str(file), "--warm-up", "0") == 0
    assert "12 requests came, 12 were answered, 0 refused" in capsys.readouterr().out


def test_steps_memory_and_price_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    gpus = ["--target", "70B:bf16", "--target-gpus", "4xH100", "--draft", "1B:bf16", "--draft-gpus", "A100-80"]
    load = ["--streams", "4", "--seconds", "8", "--prompt-tokens", "300", "--answer-tokens", "100"]
    limits = ["--set", "target.max_num_batched_tokens=2048", "--price", "H100=3"]
    assert simulate(*gpus, *load, *limits, "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dollars_per_hour"] == pytest.approx(4 * 3 + 3)
    plain = [*gpus[:4], *load, *limits, "--set", "speculation.num_speculative_tokens=0", "--json", "-"]
    assert simulate(*plain) == 0
    without = json.loads(capsys.readouterr().out)
    assert without["dollars_per_hour"] == 12
    assert found["tokens_per_second"] > 1.2 * without["tokens_per_second"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--streams", "2", "--target", "70B"], "--target and --target-gpus belong together"),
        (["--streams", "2", "--target", "70B", "--target-gpus", "A10G"], "no room for a KV block"),
        (["--streams", "2", "--seconds", "5", "--warm-up", "5"], "a warm-up of 5 s leaves nothing of 5 s"),
        (["--streams", "2", "--prompt-tokens", "9:3"], "9 to 3 tokens"),
        (["--streams", "2", "--answer-tokens", "many"], "'many' is no number of tokens"),
        (["--trace", "/nowhere/trace.jsonl"], "/nowhere/trace.jsonl cannot be read"),
        (
            ["--requests-per-second", "2", "--burstiness", "1e308"],
            "burstiness 1e+308: write one from 0.001 to 1000",
        ),
        (["--requests-per-second", "2", "--burstiness", "5e-324"], "burstiness 4.94066e-324"),
        (["--requests-per-second", "1e308"], "1e+308 requests a second"),
        (["--streams", "2", "--seconds", "1e308"], "2 streams for 1e+308 s"),
        (["--streams", "2", "--ramp-seconds", "1e308"], "started over 1e+308 s"),
        (["--streams", "2", "--interval", "5e-324"], "lengthen it"),
        (["--streams", "2", "--prompt-tokens", HUGE], "lengths of more than 1,000,000 tokens"),
        (["--streams", "2", "--answer-tokens", "nan"], "'nan' is no number of tokens"),
        (["--streams", "2", "--price", "A10G=nan"], "'A10G=nan' is no price"),
        (["--streams", "2", "--target", "70B", "--target-gpus", f"{HUGE}xH100"], "too many GPUs"),
        (["--streams", "2", "--target", "70B", "--target-gpus", "inf:1:1:1"], "none is above 1,000,000,000"),
        (["--streams", "2", "--set", "simulation.target_step_ms=[[1, 0]]"], "simulation.target_step_ms from 0 to 0"),
        (["--streams", "2", "--set", "simulation.target_step_ms=[[1, 1e308]]"], "from 1e+308 to 1e+308"),
        (["--streams", "2", "--set", f"target.replicas={HUGE}"], "more than 256 workers"),
        (["--streams", "2", "--json", "/nowhere/figures.json"], "there is no folder /nowhere"),
        (["--streams", "2", "--json", "/"], "--json / is a folder"),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(*arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "x", HUGE])
@pytest.mark.parametrize("option", ["--requests-per-second", "--streams", "--burstiness", "--seconds", "--interval"])
def test_what_is_no_number_is_told_of_its_option(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        simulate(option, value)
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"outrider simulate: error: argument {option}: '{value[:4]}")
    assert len(said) < 160


@pytest.mark.parametrize("seed", ["-1", "nan"])
def test_a_seed_is_a_whole_number_from_0_up(seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        simulate("--streams", "2", f"--seed={seed}")
    assert f"{seed!r} is not a whole number from 0 to 2**63 - 1" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["arrival_seconds", "prompt_tokens", "answer_tokens"])
@pytest.mark.parametrize("value", [HUGE, "1e400", "NaN", "-1"])
def test_a_trace_has_numbers_that_can_be(
    field: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    line = {"arrival_seconds": 1, "prompt_tokens": 5, "answer_tokens": 5, field: "@"}
    file.write_text(json.dumps(line).replace('"@"', value))
    assert simulate("--trace", str(file)) == 2
    error = capsys.readouterr().err
    assert f"{file}:1: {field} is " in error
    assert len(error) < len(str(file)) + 200


def test_a_file_that_cannot_be_written_is_told_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr("cluster.simulator.cluster.SimulatedCluster.run", run)
    assert simulate(*QUICK, "--json", str(tmp_path / "none" / "figures.json")) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_traffic_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        simulate()
    assert "one of the arguments --requests-per-second --streams --trace is required" in capsys.readouterr().err
