"""`outrider serve --launcher ray`: comes up, answers as the local launcher does, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
from openai import OpenAI

from services.launch.local import LocalCluster
from tests.soak import only_in_soak
from tests.system.cases import sampled_cases
from tests.system.client import complete_all
from tests.system.conftest import READY_TIMEOUT_SECONDS, cluster_config
from tests.system.ray.launched import (
    END_SECONDS,
    assert_nothing_left,
    environment,
    launched,
)
from tests.waiting import eventually

FLOAT32 = ("--dtype", "float32", "--set", "target.threads=1")
NUM_CASES = 20


def test_it_answers_as_the_local_launcher_does_and_down_ends_what_a_killed_one_leaves(folder: Path) -> None:
    cases = sampled_cases(NUM_CASES)
    with LocalCluster(cluster_config("target.threads=1")) as local:
        local.wait_ready(READY_TIMEOUT_SECONDS)
        expected = complete_all(local.url, cases)
    with launched(folder, *FLOAT32) as launcher:
        launcher.wait_ready()
        client = OpenAI(base_url=f"{launcher.url}/v1", api_key="none")
        model = client.models.list().data[0].id
        chunks = client.completions.create(model=model, prompt="def f(", max_tokens=8, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks)
        assert complete_all(launcher.url, cases) == expected
        assert eventually(lambda: "serve status" in launcher.said)
        commands = re.findall("^  (.*(?:ray|serve) status .*)$", launcher.said, re.MULTILINE)
        shown = [_run(command, folder) for command in commands]
        assert "Active:" in shown[0]
        assert "status: RUNNING" in shown[1]
        # Ray's own agents of a node notice only after a minute that it is gone.
        descendants = [one for one in launcher.descendants() if "Agent" not in "".join(one.cmdline())]
        launcher.process.kill()
        launcher.process.wait()
        subprocess.run(
            [sys.executable, "-m", "services.cli", "down"],
            check=True,
            env=environment(folder),
            timeout=END_SECONDS,
        )
        assert_nothing_left(launcher, descendants, folder)


@only_in_soak
def test_what_cannot_start_is_told_in_a_line_and_leaves_nothing_behind(folder: Path) -> None:
    descendants: list[psutil.Process] = []
    with launched(folder, "--draft", "/nowhere") as launcher:
        while launcher.process.poll() is None:
            descendants = descendants + [one for one in launcher.descendants() if one not in descendants]
            time.sleep(0.2)
        assert launcher.process.returncode == 2
        (line,) = re.findall("^outrider serve: .*$", launcher.said, re.MULTILINE)
        assert "cannot start" in line
        assert "/nowhere" in line
        assert_nothing_left(launcher, descendants, folder)


def _run(command: str, folder: Path) -> str:
    """Returns the output of `command` in a shell that finds this environment's programs."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, shell=True, check=True, capture_output=True, text=True, env=environment(folder) | {"PATH": path}
    )
    return done.stdout
