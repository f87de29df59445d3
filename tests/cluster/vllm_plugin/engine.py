"""A vLLM engine in a process of its own, which a test tells what to generate."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from cluster.model_folder import resolve_model_folder
from tests.system.client import Case

from .environment import ROOT, environment

_STOP_SECONDS = 30


class Engine:
    """The bundled target in float32. `additional_config` is vLLM's, and so are other `settings`."""

    def __init__(self, folder: Path, additional_config: dict[str, Any], **settings: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.vllm_plugin.engine_program"],
            cwd=ROOT,
            env={**environment(folder), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._say(
            {
                "model": str(resolve_model_folder("outrider-target-12m")),
                "dtype": "float32",
                "enforce_eager": True,
                "disable_log_stats": False,
                "gpu_memory_utilization": 0.05,  # of the memory, whatever it is called: what else runs here needs some
                "kv_cache_memory_bytes": 64 * 2**20,
                "additional_config": additional_config,
                **settings,
            }
        )

    def generate_choices(self, cases: Sequence[Case]) -> list[list[list[int]]]:
        """The choices of every case, all cases at once."""
        choices: list[list[list[int]]] = self._ask([dataclasses.asdict(case) for case in cases])
        return choices

    def generate(self, cases: Sequence[Case]) -> list[list[int]]:
        return [choice for (choice,) in self.generate_choices(cases)]

    def counters(self) -> dict[str, float]:
        """vLLM's own."""
        counters: dict[str, float] = self._ask("counters")
        return counters

    def _ask(self, command: Any) -> Any:
        self._say(command)
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        assert answer, "the engine has ended; why is on stderr"
        return json.loads(answer)

    def _say(self, command: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
