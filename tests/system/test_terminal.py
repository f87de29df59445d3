"""The commands that look at a running cluster, as a person calls them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster.config.file import load_config
from cluster.errors import ConfigurationError
from services.cli import main
from services.http_call import call
from services.launch.local import LocalCluster
from services.running_cluster.access import Access
from services.running_cluster.workers import check_unchanged, look_around
from tests.soak import only_in_soak
from tests.system.conftest import PATIENT, READY_TIMEOUT_SECONDS, cluster_config
from tests.waiting import WAIT_S

# Steps are long compared with the delays of a busy machine, and no drafts are late.
SIMULATED = (
    "target.engine=simulated",
    "draft.drafter=simulated",
    "simulation.target_step_ms=[[1, 40], [64, 48]]",
    PATIENT,
)


@pytest.fixture(scope="module")
def simulated() -> Iterator[LocalCluster]:
    with LocalCluster(cluster_config(*SIMULATED, "target.replicas=2")) as running:
        running.wait_ready(READY_TIMEOUT_SECONDS)
        yield running


class TestDoctor:
    def test_examines_a_running_cluster(
        self, simulated: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "report.json"
        arguments = [
            "--seconds",
            "0.5",
            "--repeats",
            "1",
            "--streams",
            "8",  # so that a short run has many rounds
            "--temperatures",
            "0,1",
            "--max-tokens",
            "24",
        ]
        code = main(["doctor", "--url", simulated.url, *arguments, "--json", str(file)])
        text, report = capsys.readouterr().out, json.loads(file.read_text(encoding="utf-8"))
        assert code == (1 if report["findings"] else 0)
        assert {worker["pool"] for worker in report["workers"]} == {"target", "draft"}
        assert len(report["workers"]) == 3
        assert report["num_streams"] == 8
        for entry in report["suitability"]:  # each place survives with 0.75
            assert entry["survival"][0] == pytest.approx(0.75, abs=0.15)
        assert min(report["tokens_per_second"], report["tokens_per_second_without"]) > 0
        assert len(report["waterfall"]["stages"]) == 7
        assert "low acceptance" not in text
        assert "From the formula's speedup to the measured one" in text

    @only_in_soak
    def test_it_finds_low_acceptance(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The metrics pages need a token. The doctor has it for a cluster that it starts itself.

        The depth is fixed: on a busy machine a controller may choose 0 for all of a short run, which leaves no
        acceptance to judge.
        """
        token = tmp_path / "token"
        token.write_text("scraper-0123456789abcdef\n")
        pages = [f"{section}.metrics_token_file={token}" for section in ("router", "target", "draft")]
        sick = (*SIMULATED, "simulation.acceptance=0.1", "speculation.controller=fixed", *pages)
        settings = [argument for setting in (*sick, "router.port=0") for argument in ("--set", setting)]
        loads = ["--seconds", "0.5", "--repeats", "1", "--streams", "8", "--temperatures", "0", "--max-tokens", "16"]
        assert main(["doctor", "--start", *settings, *loads]) == 1
        # On a busy machine the network may cost more.
        assert ". low acceptance (costs" in capsys.readouterr().out

    def test_without_drafts_it_says_so(self, capsys: pytest.CaptureFixture[str]) -> None:
        none = (*SIMULATED, "draft.replicas=0", "router.port=0")
        settings = [argument for setting in none for argument in ("--set", setting)]
        loads = ["--seconds", "0.5", "--repeats", "1", "--streams", "2", "--temperatures", "0", "--max-tokens", "16"]
        assert main(["doctor", "--start", *settings, *loads]) == 1
        text = capsys.readouterr().out
        assert "1. no drafts" in text
        assert "From the formula's speedup" not in text

    def test_without_a_cluster_it_says_so(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["doctor", "--url", "http://127.0.0.1:9"]) == 2
        assert "127.0.0.1:9" in capsys.readouterr().err


@only_in_soak
class TestTune:
    def test_mends_what_the_doctor_finds(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file, out = tmp_path / "given.yaml", tmp_path / "tuned.yaml"
        given = {
            "target": {"engine": "simulated", "kv_cache_bytes": 1_500_000},
            "draft": {"drafter": "simulated"},
            "simulation": {"target_step_ms": [[1, 40], [64, 48]]},
            "speculation": {"draft_timeout_ms": 60_000},
        }
        file.write_text(yaml.safe_dump(given), encoding="utf-8")
        loads = ["--seconds", "0.7", "--repeats", "1", "--trials", "1", "--streams", "8", "--temperatures", "0"]
        assert main(["tune", "--config", str(file), "--out", str(out), *loads, "--max-tokens", "24"]) == 0
        tuned = load_config(out)
        assert tuned.target.kv_cache_bytes in (3_000_000, 6_000_000)
        assert tuned.simulation.target_step_ms == ((1, 40.0), (64, 48.0))
        assert "KV cache exhausted" in capsys.readouterr().out
        assert out.read_text(encoding="utf-8").startswith("# Written by `outrider tune`")


class TestTop:
    def test_shows_what_happens(self, simulated: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
        body = {"prompt": "x", "max_tokens": 20, "ignore_eos": True, "num_speculative_tokens": 4}
        is_over, has_answered = threading.Event(), threading.Event()

        def ask() -> None:
            while not is_over.is_set():
                with contextlib.suppress(ConfigurationError):  # on a busy machine targets may be lost for seconds
                    call(simulated.url, "POST", "/v1/completions", body, seconds=WAIT_S)
                    has_answered.set()

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            assert has_answered.wait(WAIT_S)
            assert main(["top", "--url", simulated.url, "--seconds", "3", "--once"]) == 0
        finally:
            is_over.set()
            asking.join()
        text = capsys.readouterr().out
        assert re.search(r"tokens +[1-9]\d*/s", text)
        assert re.search(r"place  1 .* 0\.\d\d", text)
        assert text.count("target 127.0.0.1:") == 2
        assert text.count("draft 127.0.0.1:") == 1


class TestChat:
    def test_prints_the_answer_and_what_it_was_made_of(
        self, cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
    ) -> None:
        body = {"prompt": "def main(", "max_tokens": 48, "temperature": 0.7, "seed": 5}
        expected = call(cluster.url, "POST", "/v1/completions", body)["choices"][0]["text"]
        arguments = "--temperature 0.7 --max-tokens 48 --seed 5 --num-speculative-tokens 4 --completion 'def main('"
        assert main(["chat", "--url", cluster.url, *shlex.split(arguments)]) == 0
        answer, _, summary = capsys.readouterr().out.rpartition("\n[")
        assert answer == expected
        assert re.match(r"48 tokens in .* [1-9]\d* accepted drafts, .*(corrections|bonus tokens)", summary)

    def test_a_conversation_goes_on(
        self, cluster: LocalCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lines = iter(["Write a function.", "Now another.", ""])
        monkeypatch.setattr("builtins.input", lambda _: next(lines))
        assert main(["chat", "--url", cluster.url, "--max-tokens", "8", "--temperature", "0"]) == 0
        assert capsys.readouterr().out.count(" tokens in ") == 2


@pytest.mark.parametrize("command", ["doctor", "top", "chat"])
def test_the_example_of_the_help_works(command: str, cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    example = shlex.split(shown.rpartition("example: outrider ")[2].replace("http://127.0.0.1:8000", cluster.url))
    assert example[0] == command
    if command == "doctor":
        # One stream: between its prompts are steps of decoding, however slow the machine is.
        example += shlex.split("--streams 1 --seconds 2 --repeats 1 --temperatures 0 --max-tokens 24")
    assert main(example) in (0, 1)


@pytest.mark.parametrize("pool", ["targets", "drafts"])
def test_a_worker_that_was_started_anew_is_noticed(pool: str, cluster: LocalCluster) -> None:
    access = Access.to_own(cluster)
    facts = look_around(cluster.url, access)
    check_unchanged(facts, access)
    (worker,) = getattr(facts, pool)
    before = dataclasses.replace(facts, **{pool: (dataclasses.replace(worker, epoch=worker.epoch ^ 1),)})
    with pytest.raises(ConfigurationError, match=f"{worker.name} of .* ended or restarted"):
        check_unchanged(before, access)
