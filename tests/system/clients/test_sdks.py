"""Client libraries as people install them. In `make soak`: their environment takes a minute to install."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services.router.chat_model import Model, call_of
from tests.soak import length
from tests.waiting import WAIT_S

from .conftest import install_npm_package, missing

SCRIPT, NODE_SCRIPT = Path(__file__).with_name("sdks.py"), Path(__file__).with_name("anthropic.mjs")
PACKAGES = ("litellm==1.108.7", "langchain-openai==1.7.4", "pydantic-ai-slim[openai]==2.38.0", "instructor==1.17.0")
TYPED = {"city": "Paris", "degrees": 18}
CALL, WARM = call_of("weather", '{"city": "Paris"}'), "It is warm."

pytestmark = pytest.mark.skipif(not length(False, True), reason="runs in make soak")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the libraries."""
    folder = tmp_path_factory.mktemp("sdks")
    program = folder / "bin" / "python"
    try:
        for command in ([sys.executable, "-m", "venv", str(folder)], [str(program), "-m", "pip", "install", *PACKAGES]):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.SubprocessError) as error:
        missing(f"the libraries can't be installed: {error}")
    return program


@pytest.mark.parametrize(
    ("library", "said", "text"),
    [
        ("litellm", (CALL, WARM, json.dumps(TYPED)), WARM),
        ("langchain", (CALL, WARM, json.dumps(TYPED)), WARM),
        ("pydantic_ai", (CALL, WARM, json.dumps(TYPED)), WARM),
        ("instructor", (json.dumps(TYPED), json.dumps(TYPED)), "Paris"),
    ],
)
def test_a_tool_and_a_typed_answer(python: Path, model: Model, library: str, said: tuple[str, ...], text: str) -> None:
    model.will_say(*said)
    command = [str(python), str(SCRIPT), library, model.router.url]
    run = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == {"text": text, "typed": TYPED}


def test_anthropics_client_for_node(model: Model, tmp_path: Path) -> None:
    folder = tmp_path / "node"
    install_npm_package("@anthropic-ai/sdk@1.14.0", folder)
    script = folder / NODE_SCRIPT.name
    script.write_text(NODE_SCRIPT.read_text())
    model.will_say(CALL, WARM)
    run = subprocess.run(
        ["node", str(script), model.router.url], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {"called": {"city": "Paris"}, "text": WARM}
