"""`outrider plan cluster`: what it prints, what it refuses, and that it measures what is there."""

from __future__ import annotations

import json

import pytest

from services import cli


def test_by_default_the_published_cluster_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "cluster"]) == 0
    printed = capsys.readouterr().out
    for option in (
        "no speculation",
        "draft on the target's GPUs",
        "sidecar",
        "pool, 10 ms away",
        "INT4 draft",
        "host-cpu",
        "n-gram",
    ):
        assert option in printed
    assert printed.index("\nformula\n") < printed.index("\nassumption\n")


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "cluster", "--json", "--between-tokens-p99-ms", "40"]) == 0
    found = json.loads(capsys.readouterr().out)
    plain = found["plans"][0]
    assert plain["option"] == "no speculation"
    assert plain["round"]["num_speculative_tokens"] == 0
    assert plain["most_seqs_within_limits"] > 0


def test_the_exit_code_says_that_nothing_fits() -> None:
    assert cli.main(["plan", "cluster", "--target-gpus", "A100-80"]) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target-gpus", "4xA99"], "'A99' is unknown"),
        (["--host-cpu", "SPR-99"], "'SPR-99' is unknown"),
        (["--target", "34B"], "34B/LAYERSxKV_HEADSxHEAD_SIZE"),
        (["--round-trip-ms", "1,x"], "--round-trip-ms '1,x'"),
        (["--draft", "7B,"], "--draft '7B,'"),
        (["--price", "A10G"], "'A10G' is no price"),
        (["--sequences", "4096"], "has no room for prompts in addition to 4096 sequences"),
        (["--measure", "--set", "target.engine=simulated"], "--measure times target.engine torch, not simulated"),
        (["--measure", "--sequences", "100"], "100 sequences are more than the target's 64"),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "cluster", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", ["--acceptance", "--int4-acceptance", "--ngram-acceptance"])
@pytest.mark.parametrize("value", ["1.5", "-0.1", "nan", "x"])
def test_a_rate_is_from_0_to_1(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", "cluster", f"{option}={value}"])
    assert f"argument {option}: '{value}' is not a number from 0 to 1" in capsys.readouterr().err


def test_measured_steps_of_the_bundled_pair(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--measure", "--sequences", "2", "--prompt-tokens", "32", "--answer-tokens", "32", "--json"]
    assert cli.main(["plan", "cluster", *asked, "--num-speculative-tokens", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["option"] for row in found["plans"]] == ["no speculation", "draft on shared cores"]
    assert all(row["tokens_per_second"] > 0 and row["dollars_per_hour"] is None for row in found["plans"])
    assert found["plans"][1]["round"]["draft_seconds"] > 0
