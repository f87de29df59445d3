"""The command line: what it offers is documented, and becomes configuration."""

from __future__ import annotations

import io
import json
import logging
import queue
import re
import subprocess
import sys
import webbrowser
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cluster.config import Config
from cluster.config.file import load_config
from cluster.errors import ConfigurationError, UnavailableError
from cluster.telemetry.logs import LOG_NAME
from deploy.configuration_page import PAGE
from services import cli
from services.launch import local
from services.launch.foreground import announce
from services.settings import properties_of
from tests.waiting import WAIT_S

pytestmark = pytest.mark.usefixtures("own_logging")


def help_of(program: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        cli.main([program, "--help"])
    return capsys.readouterr().out


def test_every_option_of_serve_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    offered = set(re.findall(r"--[a-z-]+(?![a-z.-])", help_of("serve", capsys))) - {"--help"}
    assert {"--port", "--set", "--log-level", "--launcher"} <= offered
    assert offered <= set(re.findall(r"--[a-z-]+", PAGE.read_text(encoding="utf-8")))


@pytest.mark.parametrize("program", ["serve", "router", "target", "draft", "down", "check-config"])
def test_every_setting_is_an_option_of_every_program(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    described = help_of(program, capsys)
    schema = Config.model_json_schema()
    for section in schema["properties"]:
        for name in properties_of(schema, section):
            assert f"--{section}.{name} VALUE" in described
    assert "OUTRIDER_SECTION__KEY" in described


@pytest.mark.parametrize(
    "command", [["health"], ["speculation"], ["plan", "memory"], ["plan", "cluster"], ["prove"], ["distill"]]
)
def test_every_command_has_a_log_level(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    assert "--log-level" in capsys.readouterr().out


def test_check_config_shows_flags_before_environment_before_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("router: {port: 1, host: 127.0.0.1, max_body_bytes: 5}\ntarget: {engine: vllm}\n")
    monkeypatch.setenv("OUTRIDER_ROUTER__PORT", "2")
    monkeypatch.setenv("OUTRIDER_ROUTER__HOST", "127.0.0.2")
    monkeypatch.setenv("OUTRIDER_TARGET__ENGINE_ARGS", "{hf_token: xyzzy, seed: 1}")
    arguments = ["check-config", "--config", str(path), "--router.host", "127.0.0.3", "--log-level", "warning"]
    assert cli.main([*arguments, "--tracing.endpoint", "http://u:xyzzy@localhost:4318"]) == 0
    out = capsys.readouterr().out
    assert "xyzzy" not in out
    shown = yaml.safe_load(out)
    assert (shown["router"]["port"], shown["router"]["host"], shown["router"]["max_body_bytes"]) == (2, "127.0.0.3", 5)
    assert shown["logging"]["level"] == "warning"
    assert shown["target"]["engine_args"] == {"hf_token": "(hidden)", "seed": 1}


def test_what_check_config_shows_is_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-config", "--target.replicas", "3"]) == 0
    path = tmp_path / "again.yaml"
    path.write_text(capsys.readouterr().out)
    assert load_config(path) == load_config(overrides=["target.replicas=3"])


def test_check_config_says_all_that_cannot_be_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(
            [
                "check-config",
                *("--router.api_keys_file", "/nowhere/keys", "--draft.addresses", "[file:/nowhere/drafts]"),
                *("--target.addresses", "['127.0.0.1:1', 'no-such-host.invalid:7000']"),
            ]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert "router.api_keys_file: cannot read /nowhere/keys: No such file" in said
    assert "draft.addresses: cannot read /nowhere/drafts" in said
    assert "target.addresses: no-such-host.invalid:7000: " in said
    assert "127.0.0.1:1" not in said


def test_check_config_names_a_wrong_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OUTRIDER_ROUTER__PROT", "1")
    assert cli.main(["check-config"]) == 2
    assert "did you mean 'OUTRIDER_ROUTER__PORT'?" in capsys.readouterr().err


def test_the_log_level_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = []

    def serve(config: Config, opens_page: bool) -> int:
        levels.append((config.logging.level, logging.getLogger().level))
        return 0

    monkeypatch.setattr(local, "serve", serve)
    monkeypatch.setenv("OUTRIDER_LOGGING__LEVEL", "error")
    assert cli.main(["serve"]) == 0
    assert cli.main(["serve", "--log-level", "debug"]) == 0
    assert levels == [("error", logging.ERROR), ("debug", logging.DEBUG)]


@pytest.mark.parametrize("is_loaded", [True, False])
def test_the_log_format_is_a_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_loaded: bool
) -> None:
    """Errors use the log format as soon as the setting is known."""

    def serve(config: Config, opens_page: bool) -> int:
        raise ConfigurationError("no such place")

    monkeypatch.setattr(local, "serve", serve)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # back at the end
    options = ["--log-format", "json"] if is_loaded else ["--log-format", "json", "--set", "a.b=1"]
    assert cli.main(["serve", *options]) == 2
    said = capsys.readouterr().err
    if is_loaded:
        event = json.loads(said)
        assert (event["level"], event["program"], event["message"]) == ("error", "serve", "no such place")
    else:
        assert said.startswith("outrider serve: ")


def test_the_log_has_the_name_that_the_launcher_gave(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # back at the end
    monkeypatch.setenv(LOG_NAME, "draft 1")
    assert cli.main(["draft", "--log-format", "json", "--set", "draft.placement=in-process"]) == 2
    assert json.loads(capsys.readouterr().err)["program"] == "draft 1"


def test_options_of_serve_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Config] = []

    def serve(config: Config, opens_page: bool) -> int:
        served.append(config)
        return 0

    monkeypatch.setattr(local, "serve", serve)
    code = cli.main(
        [
            *("serve", "--port", "8123", "--dtype", "float32", "--draft-replicas", "3", "--set", "target.threads=2"),
            "--allow-untested-vllm",
        ]
    )
    assert code == 0
    (config,) = served
    assert config.router.port == 8123
    assert (config.target.dtype, config.draft.dtype) == ("float32", "float32")
    assert config.draft.replicas == 3
    assert config.target.threads == 2
    assert config.target.allow_untested_vllm
    assert config.draft.allow_untested_vllm


def test_a_retired_setting_is_an_option_that_help_does_not_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-config", "--draft.layers", "even"]) == 0
    assert "draft.layers is ignored" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["router", "--help"])
    assert "--draft.layers" not in capsys.readouterr().out


def test_an_unusable_setting_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--set", "target.thread=2"]) == 2
    assert capsys.readouterr().err == "outrider serve: unknown key 'target.thread'; did you mean 'threads'?\n"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["serve", "--model", "x"], "did you mean --target or --draft?"),
        (["serve", "--target.max-model-len=100"], "did you mean --target.max_model_len?"),
        (["serve", "--block-size", "16"], "did you mean --target.block_size or --draft.block_size?"),
        (["serve", "--api-key", "sk-secret"], "write NAME:KEY in a file, and set --router.api_keys_file FILE"),
        (["serve", "--root-path", "/x"], "let the proxy remove the prefix of the path (docs/OPERATING.md, Gateways)"),
        (["target", "--model", "x"], "did you mean --target.model or --draft.model?"),
        (["serve", "--prot", "1"], "did you mean --port?"),
        (["plan", "memory", "--target", "70B", "--draft", "7B", "--gpu", "4"], None),
        (["serve", "--zzz"], "see outrider serve --help"),
        (["serve", "model", "another"], "see outrider serve --help"),
        (["serve", "--api-key=sk-secret"], "write NAME:KEY in a file, and set --router.api_keys_file FILE"),
    ],
)
def test_an_unknown_option_is_an_error_of_its_command_and_names_the_nearest(
    arguments: list[str], hint: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    command = "outrider plan memory" if arguments[0] == "plan" else f"outrider {arguments[0]}"
    assert said.startswith(f"usage: {command} ")
    assert "secret" not in said
    assert hint is None or said.endswith(f"; {hint}\n")


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (["some/model"], ["target.model=some/model"]),
        (
            ["--tensor-parallel-size", "2", "--target.engine", "vllm"],
            ["target.tensor_parallel_size=2", "target.engine=vllm"],
        ),
        (["--gpu-memory-utilization", "0.5"], ["target.memory_utilization=0.5"]),
        (["--max-num-seqs", "7"], ["target.max_num_seqs=7"]),
        (["--max-model-len", "700"], ["target.max_model_len=700"]),
        (["--served-model-name", "a", "b", "--served-model-name", "c=a"], ["router.served_model_name=[a, b, c=a]"]),
        (["--served-model-name", "a"], ["router.served_model_name=a"]),
    ],
)
def test_options_of_vllm_serve_mean_the_same(
    arguments: list[str], settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Config] = []
    monkeypatch.setattr("services.launch.local.serve", lambda config, _: served.append(config) or 0)
    assert cli.main(["serve", *arguments]) == 0
    assert served == [load_config(None, settings)]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--target", "70B:int8", "--draft", "7B:int4"], 0, "6.5 GB"),
        (["--target", "70B", "--draft", "7B"], 1, "74.0 GB short"),
        (["--target", "70B", "--gpus", "4", "--draft", "7B", "--draft-gpu-memory", "24"], 0, "draft 7B fp16"),
        (["--target", "outrider-target-12m:bf16", "--draft", "outrider-draft-2m:fp32"], 0, "left of 80 GB"),
        (["--target", "13B:int8", "--draft", "self-int4"], 0, "draft self-int4"),
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
    apart = ["--target", "70B", "--draft", "self-int4", "--draft-gpu-memory", "24"]
    assert cli.main(["plan", "memory", *apart]) == 2
    assert "leave --draft-gpu-memory out" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["plan", "memory", "--target", "70B", "--draft", "7B", "--gpu-memory", "-1"])
    assert "'-1' is not a number above 0" in capsys.readouterr().err


def test_a_draft_worker_that_nobody_would_call_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["draft", "--set", "draft.placement=in-process"]) == 2
    assert "draft.placement in-process has no draft workers" in capsys.readouterr().err
    eagle = ["draft.placement=in-process", "draft.drafter=eagle", "draft.model=outrider-eagle-12m"]
    assert cli.main(["draft", *(part for setting in eagle for part in ("--set", setting))]) == 2
    assert "draft.drafter eagle drafts in the target's process" in capsys.readouterr().err


def test_importing_the_command_imports_no_torch() -> None:
    code = "import sys, services.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("opens_page", [True, False])
def test_serve_says_where_the_page_is_and_opens_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], opens_page: bool
) -> None:
    opened: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(webbrowser, "open", opened.put)
    announce(Config(), ["http://127.0.0.1:8000"], 1.0, opens_page=opens_page)
    assert "Open its page: http://127.0.0.1:8000/\n" in capsys.readouterr().out
    if opens_page:  # by a thread, which a browser may keep
        assert opened.get(timeout=WAIT_S) == "http://127.0.0.1:8000/"
    assert opened.empty()


def test_serve_cannot_open_a_page_that_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--open", "--set", "router.page=false"]) == 2
    assert "router.page is off" in capsys.readouterr().err


@pytest.mark.parametrize("pool", ["target", "draft"])
def test_importing_a_worker_imports_no_compiler(pool: str) -> None:
    """PyTorch's is a third of what there is to import, and nothing on a CPU needs it."""
    code = f"import sys, services.{pool}.main; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_reader_that_has_gone_ends_a_command_without_a_traceback() -> None:
    command = [sys.executable, "-m", "services.cli", "plan", "memory", "--target", "70B", "--draft", "1B"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as planning:
        assert planning.stdout is not None
        assert planning.stderr is not None
        planning.stdout.close()
        assert planning.stderr.read() == b""
    assert planning.returncode == 141


def test_a_terminal_that_lacks_a_character_shows_another(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = [replace(plan, run=lambda _: print("1.64 █") or 0) for plan in cli.PLANS]
    monkeypatch.setattr(cli, "PLANS", replaced)
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert cli.main(["plan", "cluster"]) == 0
    assert shown.getvalue() == b"1.64 ?\n"


def test_a_cluster_that_does_not_come_up_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def examine(arguments: object) -> int:
        raise UnavailableError("not ready after 600 s")

    monkeypatch.setattr(cli, "COMMANDS", [replace(command, run=examine) for command in cli.COMMANDS])
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "outrider doctor: not ready after 600 s\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a/model", "--target", "b/model"], "name two models"),
        (["--served-model-name", "llama", "meta-llama/Llama-3.1-8B"], "write MODEL before it"),
    ],
)
def test_a_model_is_given_once(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", *arguments]) == 2
    assert said in capsys.readouterr().err
