"""Coding agents as people install them: the model asks for a command, the agent runs it and reports its output."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.services.router.chat_model import Model, call_of
from tests.waiting import WAIT_S

from .conftest import install_npm_package

TASK = "Write a file and list the folder."
DONE = "The file is written."
COMMAND = "echo written > made.txt; ls"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
LAST_TOOL = f"tool_199_{'x' * 40}"
MANY_TOOLS = Path(__file__).with_name("many_tools.py")
CONTEXT = 400_000  # tokens; the agents' instructions alone have tens of thousands, as the test's tokenizer counts


@dataclass(frozen=True)
class CodingAgent:
    """How an agent is installed, set up and run."""

    package: str
    program: str
    tool: str  # runs a command
    argument: str  # of the tool, that holds the command
    served_tool: str  # name for the model of the MCP server's last tool
    viewer: str  # the tool that shows a picture to the model
    path: str  # of that tool, that holds the picture's path
    options: tuple[str, ...]
    set_up: Callable[[str, Path], Mapping[str, str]]  # for the router's URL and a home folder; returns the environment


def _set_up_codex(url: str, home: Path) -> Mapping[str, str]:
    provider = f'[model_providers.router]\nname = "router"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
    tools = f'[mcp_servers.many]\ncommand = "{sys.executable}"\nargs = ["{MANY_TOOLS}"]\n'
    (home / "config.toml").write_text(f'model = "chat-model"\nmodel_provider = "router"\n{provider}{tools}')
    return {"CODEX_HOME": str(home)}


def _set_up_claude_code(url: str, home: Path) -> Mapping[str, str]:
    server = {"command": sys.executable, "args": [str(MANY_TOOLS)]}
    (home / ".claude.json").write_text(json.dumps({"mcpServers": {"many": server}}))
    models = dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"), "chat-model")
    asks_for_nothing_else = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
    return {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", **models, **asks_for_nothing_else}


AGENTS = [
    CodingAgent(
        package="@openai/codex@0.171.0",
        program="codex",
        tool="exec_command",
        argument="cmd",
        served_tool=f"mcp__many.{LAST_TOOL}",
        viewer="view_image",
        path="path",
        options=("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        set_up=_set_up_codex,
    ),
    CodingAgent(
        package="@anthropic-ai/claude-code@2.1.332",
        program="claude",
        tool="Bash",
        argument="command",
        served_tool=f"mcp__many__{LAST_TOOL}",
        viewer="Read",
        path="file_path",
        options=("-p", "--allowedTools", f"Bash,Read,mcp__many__{LAST_TOOL}", "--"),
        set_up=_set_up_claude_code,
    ),
]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.program)
def test_an_agent_runs_a_command_sees_a_picture_and_calls_one_of_200_tools(
    new_model: Callable[..., Model], tmp_path: Path, agent: CodingAgent
) -> None:
    model = new_model(max_model_len=CONTEXT)
    model.target.tokens_per_reply = 16
    programs = install_npm_package(agent.package, tmp_path / "node")
    home, folder = tmp_path / "home", tmp_path / "folder"
    home.mkdir()
    folder.mkdir()
    picture = folder / "picture.png"
    picture.write_bytes(base64.b64decode(PIXEL))
    model.will_say(
        call_of(agent.tool, json.dumps({agent.argument: COMMAND, "description": "Writes a file."})),
        call_of(agent.viewer, json.dumps({agent.path: str(picture)})),
        call_of(agent.served_tool, "{}"),
        DONE,
    )
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), **agent.set_up(model.router.url, home)}
    run = subprocess.run(
        [str(programs / agent.program), *agent.options, TASK],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == DONE
    assert (folder / "made.txt").read_text() == "written\n"
    assert TASK in model.prompt
    assert "made.txt" in model.prompt.rpartition(COMMAND)[2]  # what the command printed
    assert "[image left out: this model reads only text]" in model.prompt
    assert agent.served_tool in model.prompt
    assert f"{LAST_TOOL} was called" in model.prompt
