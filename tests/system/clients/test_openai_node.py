"""OpenAI's client for Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from services.launch.local import LocalCluster


def test_whole_and_streamed_answers_and_errors(cluster: LocalCluster, node_folder: Path) -> None:
    shutil.copy(Path(__file__).with_name("client.mjs"), node_folder)
    run = subprocess.run(
        ["node", "client.mjs", cluster.url], cwd=node_folder, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert seen["model"] == "outrider-target-12m"
    assert seen["completion"] == seen["streamedCompletion"] != ""
    assert seen["chat"] == seen["streamedChat"] != ""
    assert seen["response"] == seen["streamedResponse"] == seen["chat"]
    assert seen["usage"]["completion_tokens"] == 20
    assert seen["error"] == {"status": 400, "param": "temperature", "name": "BadRequestError"}
