"""The command line: what it offers is documented, and becomes configuration."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from cluster.config import Config
from services import cli
from services.configuration_page import PAGE
from services.launch import local


def test_every_option_of_serve_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    offered = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert offered <= set(re.findall(r"--[a-z-]+", PAGE.read_text(encoding="utf-8")))


def test_options_of_serve_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Config] = []

    def serve(config: Config) -> int:
        served.append(config)
        return 0

    monkeypatch.setattr(local, "serve", serve)
    code = cli.main(
        ["serve", "--port", "8123", "--dtype", "float32", "--draft-replicas", "3", "--set", "target.threads=2"]
    )
    assert code == 0
    (config,) = served
    assert config.router.port == 8123
    assert (config.target.dtype, config.draft.dtype) == ("float32", "float32")
    assert config.draft.replicas == 3
    assert config.target.threads == 2


def test_an_unusable_setting_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--set", "target.thread=2"]) == 2
    assert capsys.readouterr().err == "outrider serve: unknown key 'target.thread'; did you mean 'threads'?\n"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--target", "70B:int8", "--draft", "7B:int4"], 0, "6.5 GB"),
        (["--target", "70B", "--draft", "7B"], 1, "74.0 GB short"),
        (["--target", "70B", "--gpus", "4", "--draft", "7B", "--draft-gpu-memory", "24"], 0, "draft 7B fp16"),
        (["--target", "outrider-target-12m:bf16", "--draft", "outrider-draft-2m:fp32"], 0, "left of 80 GB"),
    ],
)
def test_plan_memory_prints_the_budget(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "memory", *arguments]) == code
    assert said in capsys.readouterr().out


def test_plan_memory_says_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "memory", "--target", "34B", "--draft", "7B"]) == 2
    assert "34B/LAYERSxKV_HEADSxHEAD_SIZE" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["plan", "memory", "--target", "70B", "--draft", "7B", "--gpu-memory", "-1"])
    assert "'-1' is not a number above 0" in capsys.readouterr().err


def test_importing_the_command_imports_no_torch() -> None:
    code = "import sys, services.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
