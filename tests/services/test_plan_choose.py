"""`outrider plan choose`: what it prints, and what it refuses."""

from __future__ import annotations

import json

import pytest

from services import cli

_SMALL = ["--target", "8B", "--target-gpus", "L40S", "--draft", "0.5B", "--workload", "code"]


def test_the_best_option_is_marked_and_sources_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "choose", *_SMALL, "--suffix-acceptance", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n* ") == 1
    for text in ("no speculation", "EAGLE head", "one pass", "pool, 0.5 ms away", "n-gram", "suffix decoding"):
        assert text in printed
    assert "SpecDecode-Bench" in printed
    assert "changes to" in printed


def test_limits_and_lengths_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    # no target answers within a hundredth of a millisecond
    limited = ["--between-tokens-p99-ms", "0.01", "--prompt-tokens", "100", "--cached-tokens", "50", "--json"]
    assert cli.main(["plan", "choose", *_SMALL, *limited]) == 0
    (cell,) = json.loads(capsys.readouterr().out)["workloads"]
    assert (cell["prompt_tokens"], cell["cached_tokens"]) == (100, 50)
    assert {option["num_seqs"] for option in cell["options"]} == {0}


def test_more_cached_tokens_than_a_prompt_has_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "choose", *_SMALL, "--prompt-tokens", "100", "--cached-tokens", "100"]) == 2
    assert "--cached-tokens must be fewer than --prompt-tokens" in capsys.readouterr().err
