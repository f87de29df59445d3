"""The command: what it takes and refuses, and that it predicts before it measures."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.engine.host_memory import host_cache_bytes
from cluster.errors import ConfigurationError
from services import cli
from services.prove import cli as prove_cli
from services.prove import memory
from services.prove.cli import EXAMPLE, read_experiment
from services.prove.memory import fit_together
from services.prove.systems import BESIDE, PLAIN, REMOTE, OutriderSystem, make_systems
from tests.services.prove.servers import StubSystem

QUICK = ["--peer", "none", "--streams", "1", "--answers", "1", "--max-tokens", "4", "--repeats", "1"]
QUICK += ["--target-device", "cpu:0", "--draft-device", "cpu:0"]


pytestmark = pytest.mark.usefixtures("own_logging")


def parse(*arguments: str) -> argparse.Namespace:
    return cli.make_parser().parse_args(["prove", "--out", "x", *arguments])


def test_the_example_of_its_help_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["prove", "--help"])
    assert " ".join(EXAMPLE.split()) in " ".join(capsys.readouterr().out.split())
    program, *arguments = shlex.split(EXAMPLE)
    assert program == "outrider"
    cli.make_parser().parse_args(arguments)


def test_the_bundled_pair_is_the_default() -> None:
    own = read_experiment(parse("--target-device", "cpu:0"))
    assert (own.config.target.model, own.config.draft.model) == ("outrider-target-12m", "outrider-draft-2m")
    assert own.config.target.engine == "torch"
    assert own.streams == (1, 4, 16)
    assert own.is_streamed


@pytest.mark.parametrize(("gigabytes", "fits"), [(100, True), (4, False)])
def test_systems_run_together_where_the_memory_holds_them(
    gigabytes: float, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1e9 * gigabytes)
    assert fit_together(read_experiment(parse("--target-device", "cpu:0"))) is fits


def test_options_become_the_experiment(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one two three\n\nfour\n")
    own = read_experiment(
        parse(
            *(*QUICK, "--prompts", str(prompts), "--no-stream", "--temperature", "0", "--acceptance", "0.5"),
            *("--set", "target.numerics=invariant", "--draft", "outrider-target-12m"),
        )
    )
    assert own.config.draft.model == "outrider-target-12m"
    assert own.config.target.numerics == "invariant"
    assert (own.streams, own.answers, own.max_tokens, own.repeats) == ((1,), 1, 4, 1)
    assert (own.temperature, own.acceptance_rate, own.is_streamed, own.has_peer) == (0.0, 0.5, False, False)
    assert len(own.prompts) == 2
    assert own.config.router.port == 0


def test_all_sequences_have_room() -> None:
    own = read_experiment(parse(*QUICK[2:], "--peer", "none", "--streams", "200", "--max-tokens", "400")).config
    assert own.target.max_num_seqs == own.draft.max_num_seqs == 200
    assert own.target.max_model_len is not None
    per_token = 2 * 6 * 2 * 64 * 2  # key and value, layers, heads, their size, bytes
    num_bytes = host_cache_bytes(own.target, own.target.max_model_len, per_token)
    assert num_bytes >= 200 * own.target.max_model_len * per_token


@pytest.mark.parametrize(("engine", "placement"), [("torch", "in-process"), ("vllm", "sidecar")])
def test_where_the_drafts_are(engine: str, placement: str) -> None:
    own = read_experiment(parse("--peer", "none", "--engine", engine, "--target-device", "cpu:0"))
    made = make_systems(own)
    assert [system.name for system in made] == [PLAIN, BESIDE, REMOTE]
    configs = {system.name: system.config for system in made if isinstance(system, OutriderSystem)}
    assert {config.target.cpus for config in configs.values()} == {(0,)}
    assert not configs[PLAIN].has_draft_workers
    assert configs[BESIDE].draft.placement == placement
    assert configs[BESIDE].draft.cpus == (None if placement == "in-process" else (0,))
    assert configs[REMOTE].draft.placement == "pool"
    assert configs[REMOTE].draft.cpus == own.draft.cpus


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "speculation.num_speculative_tokens=0"], "there is no draft to place"),
        (["--set", "target.engine=vllm", "--set", "draft.drafter=engine"], "there is no draft to place"),
        (["--set", "draft.drafter=mtp"], "no placements to compare"),
        (["--target-device", "cpu:9999"], "not 9999"),
        (["--target", "/nowhere"], "/nowhere"),
        (["--prompts", "/nowhere"], "--prompts /nowhere cannot be read"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_experiment(parse(*arguments))


@pytest.mark.parametrize(
    "arguments", [["--streams", "0"], ["--streams", "1,x"], ["--minutes", "0"], ["--target-device", "tpu"]]
)
def test_what_cannot_be_read_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*arguments)


def test_a_peer_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove_cli, "is_vllm_installed", lambda: False)
    assert not read_experiment(parse("--target-device", "cpu:0")).has_peer
    with pytest.raises(ConfigurationError, match="vLLM is not installed"):
        read_experiment(parse("--peer", "vllm"))


def prove_with(stubs: Sequence[StubSystem], out: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(prove_cli, "make_systems", lambda experiment: list(stubs))
    ngram = ["--set", "draft.drafter=ngram"]  # whose steps need not be timed
    return cli.main(["prove", *QUICK, *ngram, "--out", str(out), *arguments])


def test_the_prediction_is_written_before_the_first_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, seen = tmp_path / "proof" / "report.md", []
    stubs = [StubSystem(name, [], at_start=lambda: seen.append(file.read_text())) for name in (PLAIN, BESIDE)]
    assert prove_with(stubs, file.parent, monkeypatch) == 0
    head, tail = seen[0].split("## Verdict")
    assert "| 1 | k = 0 | 0 |" in head
    assert "## Measured" not in tail
    assert "UTC: not complete." in head
    final = file.read_text()
    assert final == capsys.readouterr().out
    assert "## Measured, 1 stream" in final
    assert "UTC: complete." in final
    prediction = head.partition("## Predicted")[2]
    assert prediction in final  # as it was written then


def test_tokens_that_differ_fail_where_none_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invariant = ["--set", "target.numerics=invariant"]

    def run(*settings: str) -> int:
        stubs = [StubSystem(PLAIN, []), StubSystem(REMOTE, [], lambda body: [7] * body["max_tokens"])]
        return prove_with(stubs, tmp_path, monkeypatch, *settings)

    assert run() == 0
    assert run(*invariant) == 1


def test_a_system_that_cannot_be_measured_fails_and_the_others_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prove_with([StubSystem(PLAIN, []), StubSystem(REMOTE, [], fails=True)], tmp_path, monkeypatch) == 1
    text = (tmp_path / "report.md").read_text()
    assert "`remote` could not be measured: it does not start" in text
    assert "| `k = 0` |" in text


def test_the_time_limit_leaves_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stubs = [StubSystem(PLAIN, [], token_seconds=2.0)]
    assert prove_with(stubs, tmp_path, monkeypatch, "--set", "target.engine=simulated", "--minutes", "0.02") == 0
    text = (tmp_path / "report.md").read_text()
    assert "not complete, as the time limit of 0.02 minutes was reached" in text
    assert "- Not measured: `k = 0` at 1 stream, all repeats" in text


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["prove", *QUICK, "--out", str(tmp_path / "file" / "proof")]) == 2
    assert "the folder cannot be made" in capsys.readouterr().err
